//! A peer that shortens its memory under us, and faults that are none of ours.
#![cfg(not(loom))]

use std::{
    fs::File,
    io::Error,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::{fs::FileExt, process::ExitStatusExt},
    },
    process::{Command, ExitStatus},
    sync::{
        Barrier, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use pollux_sys::{MapError, Mapping, mapping_count, memfd, poison_count};
use pollux_testkit::skip;

const PAGE: usize = 4096;

/// Tests of one process share the poison count: one at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn file_of(pages: usize) -> File {
    memfd("guest", (pages * PAGE).try_into().unwrap())
        .unwrap()
        .into()
}

fn map_all(file: &File, pages: usize) -> Mapping {
    Mapping::map(file.as_fd(), 0, pages * PAGE).unwrap()
}

fn read(mapping: &Mapping, offset: usize) -> u8 {
    assert!(offset < mapping.len());
    // SAFETY: `offset` is inside the mapping.
    let ptr = unsafe { mapping.as_ptr().add(offset) };
    // SAFETY: the mapping is alive and readable; a fault is cured.
    unsafe { ptr.read_volatile() }
}

fn write(mapping: &Mapping, offset: usize, value: u8) {
    assert!(offset < mapping.len());
    // SAFETY: `offset` is inside the mapping.
    let ptr = unsafe { mapping.as_ptr().add(offset) };
    // SAFETY: the mapping is alive and writable; a fault is cured.
    unsafe { ptr.write_volatile(value) };
}

fn errno() -> *mut i32 {
    // SAFETY: always the address of this thread's errno.
    unsafe { libc::__errno_location() }
}

#[test]
fn shares_memory_with_the_file() {
    let file = file_of(3);
    let mapping = Mapping::map(file.as_fd(), 4096, 100).unwrap();
    assert_eq!(mapping.len(), 100);
    write(&mapping, 99, 42);
    let mut byte = [0];
    file.read_exact_at(&mut byte, 4096 + 99).unwrap();
    assert_eq!(byte, [42]);
    file.write_all_at(&[43], 4096).unwrap();
    assert_eq!(read(&mapping, 0), 43);
    assert!(!mapping.is_poisoned());
}

#[test]
fn a_read_beyond_a_shortened_file_poisons_this_mapping_only() {
    let _alone = alone();
    let (file, other_file) = (file_of(4), file_of(4));
    let (mapping, other) = (map_all(&file, 4), map_all(&other_file, 4));
    let twin = map_all(&file, 4);
    write(&mapping, 0, 1);
    write(&other, 0, 2);
    let before = poison_count();
    file.set_len(4096).unwrap();
    assert_eq!(read(&mapping, 0), 1, "the first page is still there");
    assert_eq!(poison_count(), before);

    // SAFETY: our own errno.
    unsafe { errno().write(77) };
    let byte = read(&mapping, 3 * PAGE);
    // SAFETY: our own errno.
    let errno_after = unsafe { errno().read() };
    assert_eq!((byte, errno_after), (0, 77));

    assert!(mapping.is_poisoned());
    assert_eq!(poison_count(), before + 1);
    assert_eq!(read(&mapping, 0), 0, "all of it is replaced");
    write(&mapping, 0, 9);
    let mut byte = [0];
    file.read_exact_at(&mut byte, 0).unwrap();
    assert_eq!(byte, [1], "and cut off from the file");
    assert!(!other.is_poisoned());
    assert_eq!(read(&other, 0), 2);
    assert!(!twin.is_poisoned(), "another mapping of the same file");
    // Restoring the file changes nothing.
    file.set_len(16_384).unwrap();
    assert_eq!(read(&twin, 3 * PAGE), 0);
    assert!(mapping.is_poisoned() && !twin.is_poisoned());
    assert_eq!(poison_count(), before + 1);
}

#[test]
fn a_write_beyond_a_shortened_file_poisons_too() {
    let _alone = alone();
    let file = file_of(2);
    let mapping = map_all(&file, 2);
    let before = poison_count();
    file.set_len(0).unwrap();
    write(&mapping, PAGE, 5);
    assert!(mapping.is_poisoned());
    assert_eq!(read(&mapping, PAGE), 5, "the write went to our own memory");
    assert_eq!(poison_count(), before + 1);
    drop(mapping);
    let mapping = Mapping::map(file_of(1).as_fd(), 0, PAGE).unwrap();
    assert!(!mapping.is_poisoned(), "the next user of the entry");
}

#[test]
fn threads_that_fault_at_once_keep_what_they_write() {
    const THREADS: usize = 4;
    let _alone = alone();
    for _ in 0..300 {
        let file = file_of(THREADS);
        let mapping = map_all(&file, THREADS);
        file.set_len(0).unwrap();
        let before = poison_count();
        let barrier = Barrier::new(THREADS);
        thread::scope(|scope| {
            for index in 0..THREADS {
                let (mapping, barrier) = (&mapping, &barrier);
                scope.spawn(move || {
                    barrier.wait();
                    let value = u8::try_from(index + 1).unwrap();
                    write(mapping, index * PAGE, value);
                    // A second laying-over would have thrown it away.
                    assert_eq!(read(mapping, index * PAGE), value);
                    assert!(mapping.is_poisoned());
                });
            }
        });
        assert_eq!(poison_count(), before + 1);
        for index in 0..THREADS {
            assert_eq!(usize::from(read(&mapping, index * PAGE)), index + 1);
        }
    }
}

#[test]
fn faults_do_not_touch_mappings_that_come_and_go() {
    let _alone = alone();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let churn = scope.spawn(|| {
            let mut rounds = 0_u32;
            while !stop.load(Ordering::Relaxed) {
                let file = file_of(1);
                let mappings = [(); 8].map(|()| map_all(&file, 1));
                write(&mappings[0], 10, 123);
                for mapping in &mappings {
                    assert_eq!(read(mapping, 10), 123);
                    assert!(!mapping.is_poisoned());
                }
                rounds += 1;
            }
            rounds
        });
        for _ in 0..1_000 {
            let file = file_of(1);
            let mapping = map_all(&file, 1);
            file.set_len(0).unwrap();
            assert_eq!(read(&mapping, 0), 0);
            assert!(mapping.is_poisoned());
        }
        stop.store(true, Ordering::Relaxed);
        assert!(churn.join().unwrap() > 0);
    });
}

#[test]
fn refuses_with_the_numbers() {
    let file = file_of(2);
    let error = |offset, len| Mapping::map(file.as_fd(), offset, len).unwrap_err();
    assert!(matches!(error(0, 0), MapError::Empty { offset: 0 }));
    let outside = error(4096, 4097);
    assert!(matches!(
        outside,
        MapError::OutsideFile {
            offset: 4096,
            len: 4097,
            file_bytes: 8192
        }
    ));
    assert_eq!(
        outside.to_string(),
        "4097 bytes at offset 4096 end beyond the file, which has 8192 bytes"
    );
    let last_page = u64::MAX - 4095;
    // The last offset that the kernel can say, and one page too many.
    let largest = i64::MAX.cast_unsigned();
    for (offset, len) in [
        (last_page, 4096),
        (4096, usize::MAX),
        (last_page, 1),
        (u64::MAX, 1),
        (largest, 1),
        (largest - 100, 200),
    ] {
        assert!(matches!(error(offset, len), MapError::Overflow { .. }));
    }
    let (socket, _other_end) = std::os::unix::net::UnixStream::pair().unwrap();
    assert!(matches!(
        Mapping::map(socket.as_fd(), 0, PAGE),
        Err(MapError::OutsideFile { file_bytes: 0, .. })
    ));
    let read_only = File::open("/proc/self/exe").unwrap();
    assert!(matches!(
        Mapping::map(read_only.as_fd(), 0, PAGE),
        Err(MapError::Mmap { .. })
    ));
    assert!(memfd("a\0b", 0).is_err());
    assert!(memfd("too long", u64::MAX).is_err());
}

#[test]
fn an_offset_inside_a_page_is_as_good_as_any() {
    // Alone in a process: nobody else maps anything where it was unmapped.
    if let Some(status) = in_child("an_offset_inside_a_page_is_as_good_as_any") {
        assert!(status.success(), "{status}");
        return;
    }
    let file = file_of(4);
    let numbers = (0..=250).flat_map(|number| [number; 97]);
    let bytes: Vec<u8> = numbers.take(4 * PAGE).collect();
    file.write_all_at(&bytes, 0).unwrap();
    let before = mapping_count();
    // (offset, len): inside a page, up to its end, over its end, to the end.
    for (offset, len) in [(1, 1), (100, 3996), (4095, 2), (5000, 4 * PAGE - 5000)] {
        let at = usize::try_from(offset).unwrap();
        let mapping = Mapping::map(file.as_fd(), offset, len).unwrap();
        assert_eq!(mapping.len(), len);
        for index in [0, len / 2, len - 1] {
            assert_eq!(read(&mapping, index), bytes[at + index], "{offset}, {len}");
        }
    }
    assert!(matches!(
        Mapping::map(file.as_fd(), 5000, 4 * PAGE - 5000 + 1),
        Err(MapError::OutsideFile { offset: 5000, .. })
    ));
    let mapping = Mapping::map(file.as_fd(), 100, 2 * PAGE).unwrap();
    let (first, end) = (mapping.as_ptr().addr().get() - 100, 2 * PAGE + 100);
    file.set_len(4096).unwrap();
    assert_eq!(read(&mapping, 0), bytes[100]);
    assert_eq!(read(&mapping, 2 * PAGE - 1), 0, "a fault in the last page");
    assert!(mapping.is_poisoned());
    assert_eq!(read(&mapping, 0), 0, "all of it is replaced");
    drop(mapping);
    assert_eq!(mapping_count(), before);
    // Every page is unmapped, the first and the last too.
    for page in (first..first + end).step_by(PAGE) {
        assert!(!is_mapped(page), "{page:#x}");
    }
}

/// Whether there is memory at an address, of whatever kind.
fn is_mapped(page: usize) -> bool {
    let mut resident = 0;
    let page = std::ptr::without_provenance_mut::<libc::c_void>(page);
    // SAFETY: the kernel only looks, and writes one byte for one page.
    unsafe { libc::mincore(page, PAGE, &raw mut resident) == 0 }
}

/// On hugetlbfs everything is in huge pages: what is mapped, laid over, unmapped.
#[test]
fn huge_pages_are_mapped_laid_over_and_unmapped_whole() {
    const HUGE: usize = 2 << 20;
    const TEST: &str = "huge_pages_are_mapped_laid_over_and_unmapped_whole";
    if let Some(status) = in_child(TEST) {
        assert!(status.success(), "{status}");
        return;
    }
    // SAFETY: a C string and flags.
    let fd = unsafe {
        libc::memfd_create(
            c"huge".as_ptr(),
            libc::MFD_CLOEXEC | libc::MFD_HUGETLB | libc::MFD_HUGE_2MB,
        )
    };
    if fd < 0 {
        let error = Error::last_os_error();
        skip(TEST, &format!("no 2 MiB huge pages: {error}"));
        return;
    }
    // SAFETY: the descriptor was made for us just now.
    let file: File = unsafe { std::os::fd::FromRawFd::from_raw_fd(fd) };
    file.set_len((2 * HUGE).try_into().unwrap()).unwrap();
    let mapping = match Mapping::map(file.as_fd(), 0, HUGE + 1) {
        Ok(mapping) => mapping,
        Err(error) => {
            skip(TEST, &format!("no 2 MiB huge pages are set aside: {error}"));
            return;
        }
    };
    write(&mapping, HUGE, 1);
    // As QEMU cuts the memory of a PC around the hole below 1 MiB.
    let upper = Mapping::map(file.as_fd(), 0xc_0000, 2 * HUGE - 0xc_0000).unwrap();
    assert_eq!(read(&upper, HUGE - 0xc_0000), 1);
    write(&upper, 0, 2);
    assert_eq!(read(&mapping, 0xc_0000), 2);
    let lower = Mapping::map(file.as_fd(), 4096, PAGE).unwrap();
    write(&mapping, 4096, 3);
    assert_eq!(read(&lower, 0), 3);
    file.set_len(0).unwrap();
    assert_eq!(read(&mapping, HUGE), 0);
    assert!(mapping.is_poisoned() && !upper.is_poisoned());
    assert_eq!(read(&upper, upper.len() - 1), 0);
    assert!(upper.is_poisoned() && !lower.is_poisoned());
    assert_eq!(read(&lower, 0), 0);
    assert!(lower.is_poisoned());
    let pages = [&mapping, &upper, &lower].map(|m| m.as_ptr().addr().get() & !(HUGE - 1));
    drop((mapping, upper, lower));
    for page in pages {
        assert!(!is_mapped(page), "{page:#x}");
    }
}

// Faults that are not ours. Each of these tests runs itself again as a child
// process, which is to die.

const CHILD: &str = "POLLUX_SYS_TEST_CHILD";

/// The outcome of `test` in a child; `None` if this is the child.
fn in_child(test: &str) -> Option<ExitStatus> {
    if std::env::var_os(CHILD).is_some() {
        let none = libc::rlimit {
            rlim_cur: 0,
            rlim_max: 0,
        };
        // SAFETY: points to a whole `rlimit`.
        unsafe { libc::setrlimit(libc::RLIMIT_CORE, &raw const none) };
        return None;
    }
    let status = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--test-threads=1"])
        .env(CHILD, "1")
        .status()
        .unwrap();
    Some(status)
}

/// Touches a shortened file that was mapped behind the registry's back.
fn fault_elsewhere() {
    let file = file_of(1);
    let start = map_behind_the_back(file.as_fd());
    file.set_len(0).unwrap();
    // SAFETY: the page is mapped; that it faults is the point.
    unsafe { start.read_volatile() };
}

fn map_behind_the_back(fd: BorrowedFd<'_>) -> *mut u8 {
    use std::os::fd::AsRawFd;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: at an address that the kernel chooses.
    let start = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            PAGE,
            protection,
            libc::MAP_SHARED,
            fd.as_raw_fd(),
            0,
        )
    };
    assert_ne!(start, libc::MAP_FAILED);
    start.cast()
}

#[test]
fn a_fault_elsewhere_kills() {
    let Some(status) = in_child("a_fault_elsewhere_kills") else {
        let mapping = map_all(&file_of(1), 1);
        fault_elsewhere();
        panic!("survived, poisoned: {}", mapping.is_poisoned());
    };
    assert_eq!(status.signal(), Some(libc::SIGBUS), "{status}");
}

#[test]
fn a_fault_in_a_mapping_that_is_gone_kills() {
    let Some(status) = in_child("a_fault_in_a_mapping_that_is_gone_kills") else {
        let file = file_of(1);
        let mapping = map_all(&file, 1);
        let start = mapping.as_ptr();
        drop(mapping);
        // The kernel gives the same address again.
        let again = map_behind_the_back(file.as_fd());
        assert_eq!(again, start.as_ptr());
        file.set_len(0).unwrap();
        // SAFETY: the page is mapped; that it faults is the point.
        unsafe { again.read_volatile() };
        panic!("survived");
    };
    assert_eq!(status.signal(), Some(libc::SIGBUS), "{status}");
}

#[test]
fn a_signal_from_a_process_kills() {
    let Some(status) = in_child("a_signal_from_a_process_kills") else {
        // Not Rust's own action, which expects every SIGBUS to be a fault that
        // repeats, and swallows the first that is not.
        // SAFETY: no function of ours is passed.
        unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
        let _mapping = map_all(&file_of(1), 1);
        // SAFETY: no pointers.
        unsafe { libc::raise(libc::SIGBUS) };
        panic!("survived");
    };
    assert_eq!(status.signal(), Some(libc::SIGBUS), "{status}");
}

#[test]
fn the_previous_action_gets_a_fault_elsewhere() {
    extern "C" fn leave(_signal: libc::c_int) {
        // SAFETY: may be called anywhere.
        unsafe { libc::_exit(42) };
    }
    let Some(status) = in_child("the_previous_action_gets_a_fault_elsewhere") else {
        let leave: extern "C" fn(libc::c_int) = leave;
        // SAFETY: the function may run at any point.
        unsafe { libc::signal(libc::SIGBUS, leave as libc::sighandler_t) };
        let file = file_of(1);
        let mapping = map_all(&file, 1);
        file.set_len(0).unwrap();
        // Ours first: contained.
        assert_eq!(read(&mapping, 0), 0);
        assert!(mapping.is_poisoned());
        fault_elsewhere();
        panic!("survived");
    };
    assert_eq!(status.code(), Some(42), "{status}");
}
