//! Randomness that comes in as a seed, so that a failure can be repeated.

/// SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number
/// generators"): small, and every seed will do.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Starts from `seed`, which a test prints when it fails.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Any number.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// A number below `end`.
    ///
    /// # Panics
    /// If `end` is 0.
    pub fn below(&mut self, end: u32) -> u32 {
        assert!(end > 0, "nothing is below 0");
        u32::try_from(self.bits() % u64::from(end)).expect("below a u32")
    }

    /// True once in `times`.
    pub fn one_in(&mut self, times: u32) -> bool {
        self.below(times) == 0
    }

    /// One of `choices`.
    ///
    /// # Panics
    /// If there is none.
    pub fn choose<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        let len = u32::try_from(choices.len()).expect("few choices");
        &choices[self.below(len) as usize]
    }
}
