//! Variants of the guests' driver: what is asked of it, and what it says it
//! took. A driver takes another path without a word when a feature was not
//! offered or the processor lacks an instruction, so both are read: the
//! acknowledged features from the forwarder, the receive and transmit functions
//! from the driver's own log.

use std::fmt;

use clap::ValueEnum;
use serde::Serialize;
use serde_json::Value;

/// A path of DPDK's virtio driver (`drivers/net/virtio/virtio_ethdev.c`:
/// `virtio_dev_configure`, `set_rxtx_funcs`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Variant {
    SplitMergeable,
    Split,
    SplitInOrderMergeable,
    SplitInOrder,
    SplitVectorized,
    PackedMergeable,
    Packed,
    PackedInOrderMergeable,
    PackedInOrder,
    PackedVectorized,
}

/// `--variant`: one, or all of them.
#[derive(Clone, Copy, Debug)]
pub(super) enum Choice {
    All,
    One(Variant),
}

impl ValueEnum for Choice {
    fn value_variants<'a>() -> &'a [Self] {
        const CHOICES: &[Choice] = &[
            Choice::All,
            Choice::One(Variant::SplitMergeable),
            Choice::One(Variant::Split),
            Choice::One(Variant::SplitInOrderMergeable),
            Choice::One(Variant::SplitInOrder),
            Choice::One(Variant::SplitVectorized),
            Choice::One(Variant::PackedMergeable),
            Choice::One(Variant::Packed),
            Choice::One(Variant::PackedInOrderMergeable),
            Choice::One(Variant::PackedInOrder),
            Choice::One(Variant::PackedVectorized),
        ];
        CHOICES
    }

    fn to_possible_value(&self) -> Option<clap::builder::PossibleValue> {
        match self {
            Self::All => Some(clap::builder::PossibleValue::new("all")),
            Self::One(variant) => variant.to_possible_value(),
        }
    }
}

/// The variants that were chosen, each once.
pub(super) fn chosen(choices: &[Choice]) -> Vec<Variant> {
    let mut variants = Vec::new();
    for choice in choices {
        let more = match choice {
            Choice::All => Variant::value_variants(),
            Choice::One(variant) => std::slice::from_ref(variant),
        };
        for variant in more {
            if !variants.contains(variant) {
                variants.push(*variant);
            }
        }
    }
    variants
}

impl Variant {
    pub(super) fn name(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }

    const fn is_packed(self) -> bool {
        matches!(
            self,
            Self::PackedMergeable
                | Self::Packed
                | Self::PackedInOrderMergeable
                | Self::PackedInOrder
                | Self::PackedVectorized
        )
    }

    const fn is_mergeable(self) -> bool {
        matches!(
            self,
            Self::SplitMergeable
                | Self::SplitInOrderMergeable
                | Self::PackedMergeable
                | Self::PackedInOrderMergeable
        )
    }

    /// Of packed rings only the driver that acknowledges it is vectorized; of
    /// split rings, only one that does not.
    const fn is_in_order(self) -> bool {
        matches!(
            self,
            Self::SplitInOrderMergeable
                | Self::SplitInOrder
                | Self::PackedInOrderMergeable
                | Self::PackedInOrder
                | Self::PackedVectorized
        )
    }

    const fn is_vectorized(self) -> bool {
        matches!(self, Self::SplitVectorized | Self::PackedVectorized)
    }

    /// As virtio-user's device arguments.
    pub(super) fn device(self) -> String {
        format!(
            "packed_vq={},mrg_rxbuf={},in_order={},vectorized={}",
            u8::from(self.is_packed()),
            u8::from(self.is_mergeable()),
            u8::from(self.is_in_order()),
            u8::from(self.is_vectorized()),
        )
    }

    /// The functions that it is to take, in the words of the driver's log.
    const fn path(self) -> [&'static str; 2] {
        match self {
            Self::SplitMergeable => ["mergeable buffer", "standard"],
            Self::Split => ["standard", "standard"],
            Self::SplitInOrderMergeable | Self::SplitInOrder => ["inorder", "inorder"],
            Self::SplitVectorized => ["vectorized", "standard"],
            Self::PackedMergeable | Self::PackedInOrderMergeable => {
                ["packed ring mergeable buffer", "packed ring standard"]
            }
            Self::Packed | Self::PackedInOrder => ["packed ring standard", "packed ring standard"],
            Self::PackedVectorized => ["packed ring vectorized", "packed ring vectorized"],
        }
    }
}

const MRG_RXBUF: &str = "VIRTIO_NET_F_MRG_RXBUF";
const RING_PACKED: &str = "VIRTIO_F_RING_PACKED";
const IN_ORDER: &str = "VIRTIO_F_IN_ORDER";
/// Bits that tell variants apart, and others that cost or save work (virtio
/// 1.2, sections 5.1.3 and 6).
const BITS: [(u32, &str); 6] = [
    (15, MRG_RXBUF),
    (28, "VIRTIO_F_INDIRECT_DESC"),
    (29, "VIRTIO_F_EVENT_IDX"),
    (32, "VIRTIO_F_VERSION_1"),
    (34, RING_PACKED),
    (35, IN_ORDER),
];

/// What the guests of a sample really had.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Taken {
    /// Acknowledged features, of those that matter here; `None` if the
    /// forwarder does not say.
    features: Option<Vec<&'static str>>,
    /// The driver's functions as it names them, both ports; `None` if it does
    /// not.
    rx_path: Option<String>,
    tx_path: Option<String>,
}

impl Taken {
    /// What pollux says in a document of statistics, and the guests' log.
    pub(super) fn of_pollux(documents: &[Value], guests: &str) -> Self {
        let ports = documents.last().and_then(|last| last["ports"].as_array());
        let lists = ports.into_iter().flatten();
        let lists = lists.filter_map(|port| port["features"].as_array());
        let lists: Vec<&Vec<Value>> = lists.filter(|list| !list.is_empty()).collect();
        let has = |name: &str| {
            lists
                .iter()
                .all(|list| list.iter().any(|feature| feature == name))
        };
        let names = BITS.iter().map(|(_, name)| *name);
        Self {
            features: (!lists.is_empty()).then(|| names.filter(|name| has(name)).collect()),
            ..Self::of_guests(guests)
        }
    }

    /// The last word of vhost's log, and the guests' log.
    pub(super) fn of_dpdk(vhost: &str, guests: &str) -> Self {
        let bits = vhost.rsplit_once("negotiated Virtio features: 0x");
        let bits = bits.and_then(|(_, rest)| {
            let end = rest.find(|c: char| !c.is_ascii_hexdigit());
            u64::from_str_radix(&rest[..end.unwrap_or(rest.len())], 16).ok()
        });
        let names = |bits: u64| {
            let set = BITS.iter().filter(|(bit, _)| bits >> bit & 1 != 0);
            set.map(|(_, name)| *name).collect()
        };
        Self {
            features: bits.map(names),
            ..Self::of_guests(guests)
        }
    }

    fn of_guests(log: &str) -> Self {
        let path = |direction: &str| {
            let end = format!(" {direction} path on port");
            let of_line = |line: &str| {
                let (_, rest) = line.split_once("virtio: using ")?;
                Some(rest.split_once(&end)?.0.to_owned())
            };
            log.lines().filter_map(of_line).next_back()
        };
        Self {
            features: None,
            rx_path: path("Rx"),
            tx_path: path("Tx"),
        }
    }

    /// Whether it is what was asked for; what it is instead, if not.
    pub(super) fn differs(&self, variant: Variant) -> Option<String> {
        let mut differences = Vec::new();
        match &self.features {
            None => differences.push("features unknown".to_owned()),
            Some(features) => {
                for (name, is_asked) in [
                    (MRG_RXBUF, variant.is_mergeable()),
                    (RING_PACKED, variant.is_packed()),
                    (IN_ORDER, variant.is_in_order()),
                ] {
                    if features.contains(&name) != is_asked {
                        let without = if is_asked { "without " } else { "with " };
                        differences.push(format!("{without}{name}"));
                    }
                }
            }
        }
        let asked = variant.path();
        for (direction, path, asked) in [
            ("rx", &self.rx_path, asked[0]),
            ("tx", &self.tx_path, asked[1]),
        ] {
            match path.as_deref() {
                Some(path) if path == asked => {}
                Some(path) => differences.push(format!("{direction} path \"{path}\"")),
                None => differences.push(format!("{direction} path unknown")),
            }
        }
        let has_fallen_back = variant == Variant::PackedVectorized
            && self.rx_path.is_some()
            && self.rx_path.as_deref() != Some(asked[0]);
        if has_fallen_back {
            let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
            differences.push(no_packed_vectors(&cpuinfo).to_owned());
        }
        (!differences.is_empty()).then(|| differences.join(", "))
    }
}

/// What the vectorized functions for packed rings lack: they want AVX-512, and
/// EAL's leave to use it, which is not the default.
fn no_packed_vectors(cpuinfo: &str) -> &'static str {
    let mut flags = cpuinfo.lines().filter(|line| line.starts_with("flags"));
    if flags.any(|line| line.split_whitespace().any(|flag| flag == "avx512f")) {
        "EAL was not given --force-max-simd-bitwidth=512, or DPDK was built without AVX-512"
    } else {
        "this processor has no AVX-512"
    }
}

impl fmt::Display for Taken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = |path: &Option<String>| path.clone().unwrap_or_else(|| "unknown".to_owned());
        write!(
            f,
            "rx {}, tx {}; ",
            path(&self.rx_path),
            path(&self.tx_path)
        )?;
        match &self.features {
            None => write!(f, "features unknown"),
            Some(features) => {
                let short = features.iter().map(|name| {
                    let (_, short) = name.rsplit_once("_F_").unwrap_or(("", name));
                    short
                });
                write!(f, "{}", short.collect::<Vec<_>>().join(" "))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_variant_can_be_chosen_once() {
        let all = Variant::value_variants();
        assert_eq!(all.len(), 10);
        assert_eq!(
            chosen(&[Choice::One(Variant::Packed), Choice::All]).len(),
            10
        );
        for choice in Choice::value_variants() {
            let value = choice.to_possible_value().unwrap();
            assert!(Choice::from_str(value.get_name(), false).is_ok());
        }
        assert_eq!(Choice::value_variants().len(), all.len() + 1);
        assert_eq!(
            Variant::PackedVectorized.device(),
            "packed_vq=1,mrg_rxbuf=0,in_order=1,vectorized=1"
        );
    }

    const LOG: &str = "set_rxtx_funcs(): virtio: using packed ring standard Tx path on port 1\n\
                       set_rxtx_funcs(): virtio: using packed ring standard Rx path on port 1\n";

    #[test]
    fn a_path_that_was_not_taken_is_told() {
        let vhost = "VHOST_CONFIG: (x) negotiated Virtio features: 0x0\n\
                     VHOST_CONFIG: (x) negotiated Virtio features: 0xd10008000\nmore";
        let taken = Taken::of_dpdk(vhost, LOG);
        assert_eq!(
            taken.to_string(),
            "rx packed ring standard, tx packed ring standard; \
             MRG_RXBUF INDIRECT_DESC VERSION_1 RING_PACKED IN_ORDER"
        );
        let vhost = vhost.replace("0xd10008000", "0xd00000000");
        let taken = Taken::of_dpdk(&vhost, LOG);
        assert_eq!(taken.differs(Variant::PackedInOrder), None);
        assert_eq!(
            taken.differs(Variant::Packed).unwrap(),
            "with VIRTIO_F_IN_ORDER"
        );
        let differs = taken.differs(Variant::PackedVectorized).unwrap();
        assert!(
            differs.starts_with(
                "rx path \"packed ring standard\", tx path \"packed ring standard\", "
            ),
            "{differs}"
        );
        let without = no_packed_vectors("flags\t\t: sse avx2\n");
        assert_eq!(without, "this processor has no AVX-512");
        assert!(no_packed_vectors("flags\t\t: avx512f sse\n").contains("EAL"));
        let unknown = Taken::of_dpdk("", "").differs(Variant::Split).unwrap();
        assert_eq!(
            unknown,
            "features unknown, rx path unknown, tx path unknown"
        );
    }

    #[test]
    fn what_pollux_says_is_read() {
        let port = json!({"features": [RING_PACKED, "VIRTIO_F_VERSION_1"]});
        let documents = [json!({"ports": [port, port]})];
        let taken = Taken::of_pollux(&documents, LOG);
        assert_eq!(taken.differs(Variant::Packed), None);
        let nothing = Taken::of_pollux(&[json!({"ports": []})], LOG);
        assert_eq!(nothing.features, None);
    }
}
