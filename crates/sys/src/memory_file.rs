//! Whether a file that a peer sent as memory is memory.
//!
//! A page of a memfd, of tmpfs or of hugetlbfs comes from the kernel alone. A
//! page of any other file comes from its file system, and with FUSE that is a
//! process of whoever sent the file: the first touch of the page then waits for
//! that process, for as long as it likes, and no signal but a deadly one ends
//! the wait.

use std::{fmt, io, os::fd::BorrowedFd};

use crate::descriptor;

/// What a file is that was sent as memory. Shown, it is a name for an operator:
/// "tmpfs", "ext4", "fuse.sshfs", "a device".
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryFile {
    /// Of memory, the file system; else what the file is instead.
    system: Result<&'static str, String>,
    page_bytes: u64,
}

impl MemoryFile {
    /// True for a memfd (ordinary or with huge pages) and for a file on tmpfs or
    /// hugetlbfs: touching it waits for nobody outside the kernel.
    #[must_use]
    pub fn is_memory(&self) -> bool {
        self.system.is_ok()
    }

    /// Bytes of a page, the unit in which the file is mapped: the huge page size
    /// on hugetlbfs, the system's elsewhere.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.page_bytes
    }
}

impl fmt::Display for MemoryFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.system {
            Ok(system) => f.write_str(system),
            Err(found) => f.write_str(found),
        }
    }
}

/// Says what a file is that was sent as memory, without asking anybody but the
/// kernel: whoever sent the file may be the one who answers for it.
///
/// # Errors
///
/// Those of `statx(2)`, and of `fstatfs(2)` on memory.
pub fn memory_file(fd: BorrowedFd<'_>) -> io::Result<MemoryFile> {
    let system = match memory_type(fd)? {
        Some(libc::HUGETLBFS_MAGIC) => Ok("hugetlbfs"),
        Some(_) => Ok("tmpfs"),
        None => Err(what_else(fd)?),
    };
    Ok(MemoryFile {
        system,
        page_bytes: page_bytes(fd)?,
    })
}

/// Type of the file system of a file that is memory; `None` for any other file,
/// whose file system is not asked.
fn memory_type(fd: BorrowedFd<'_>) -> io::Result<Option<libc::c_long>> {
    if !descriptor::knows_seals(fd) {
        return Ok(None);
    }
    Ok(Some(descriptor::statfs(fd)?.f_type))
}

/// What a file is that is not memory.
fn what_else(fd: BorrowedFd<'_>) -> io::Result<String> {
    let mode = descriptor::stat(fd)?.mode;
    if mode & libc::S_IFMT != libc::S_IFREG {
        return Ok(descriptor::kind(mode).to_owned());
    }
    let unknown = || "a file on a mount that this process does not have".to_owned();
    Ok(descriptor::file_system(fd).unwrap_or_else(unknown))
}

/// The unit in which a file can be mapped: the huge page size on hugetlbfs, whose
/// block size it is, the system's page size elsewhere.
pub(crate) fn page_bytes(fd: BorrowedFd<'_>) -> io::Result<u64> {
    let page_bytes = if memory_type(fd)? == Some(libc::HUGETLBFS_MAGIC) {
        descriptor::statfs(fd)?.f_bsize
    } else {
        // SAFETY: no pointers are passed.
        unsafe { libc::sysconf(libc::_SC_PAGESIZE) }
    };
    match u64::try_from(page_bytes) {
        Ok(page_bytes) if page_bytes.is_power_of_two() => Ok(page_bytes),
        _ => Err(io::Error::other("the kernel does not tell the page size")),
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::{
        fs::File,
        os::fd::{AsFd, FromRawFd, OwnedFd},
    };

    use super::*;

    #[test]
    fn memory_is_told_from_other_files() {
        let memfd = crate::memfd("guest", 4096).unwrap();
        let memory = memory_file(memfd.as_fd()).unwrap();
        assert!(memory.is_memory());
        assert_eq!(
            (memory.to_string().as_str(), memory.page_bytes()),
            ("tmpfs", 4096)
        );
        for (path, name) in [("/proc/self/status", "proc"), ("/dev/null", "a device")] {
            let other = memory_file(File::open(path).unwrap().as_fd()).unwrap();
            assert!(!other.is_memory(), "{path}");
            assert_eq!(other.to_string(), name);
        }
        let directory = memory_file(File::open("/dev/shm").unwrap().as_fd()).unwrap();
        assert!(!directory.is_memory(), "tmpfs, but nothing to be mapped");
        assert_eq!(directory.to_string(), "a directory");
    }

    #[test]
    fn files_on_tmpfs_are_memory_and_files_on_disks_are_named() {
        let path = format!("/dev/shm/pollux-sys-test-{}", std::process::id());
        let file = File::create(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let tmpfs = memory_file(file.as_fd()).unwrap();
        assert!(tmpfs.is_memory());
        assert_eq!(tmpfs.to_string(), "tmpfs");
        let program = File::open("/proc/self/exe").unwrap();
        let disk = memory_file(program.as_fd()).unwrap().to_string();
        let known = std::fs::read_to_string("/proc/filesystems").unwrap();
        let mut names = known.lines().filter_map(|line| line.split('\t').nth(1));
        assert!(names.any(|name| name == disk), "{disk}");
    }

    #[test]
    fn huge_pages_are_memory_too() {
        // SAFETY: a C string and flags.
        let fd = unsafe {
            libc::memfd_create(
                c"huge".as_ptr(),
                libc::MFD_CLOEXEC | libc::MFD_HUGETLB | libc::MFD_HUGE_2MB,
            )
        };
        if fd < 0 {
            let error = io::Error::last_os_error();
            let reason = format!("no 2 MiB huge pages: {error}");
            return pollux_testkit::skip("huge_pages_are_memory_too", &reason);
        }
        // SAFETY: the descriptor was made for us just now.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let huge = memory_file(fd.as_fd()).unwrap();
        assert!(huge.is_memory());
        assert_eq!(
            (huge.to_string().as_str(), huge.page_bytes()),
            ("hugetlbfs", 2 << 20)
        );
    }
}
