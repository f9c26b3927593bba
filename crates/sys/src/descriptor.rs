//! What a descriptor that a peer sent is: questions that change nothing, and that
//! the kernel answers by itself.
//!
//! `fstat(2)` and `fstatfs(2)` are not among them: they ask the file system, which
//! with FUSE is a process of the peer's, and if that does not answer no signal but
//! a deadly one ends the wait. (Nor is `close(2)`, which no one can do without.)

use std::{
    fs, io,
    mem::MaybeUninit,
    os::fd::{AsRawFd, BorrowedFd},
};

use libc::c_int;

/// What the kernel knows of a file without asking its file system.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stat {
    /// Format and permission bits.
    pub(crate) mode: libc::mode_t,
    /// The length; 0 for what has none (a device, a socket).
    pub(crate) bytes: u64,
}

/// `statx(2)` with AT_STATX_DONT_SYNC.
pub(crate) fn stat(fd: BorrowedFd<'_>) -> io::Result<Stat> {
    let mut stat = MaybeUninit::<libc::statx>::uninit();
    // SAFETY: the path is a C string, and the kernel writes one `statx` to memory
    // that we own.
    let result = unsafe {
        libc::statx(
            fd.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC,
            libc::STATX_TYPE | libc::STATX_SIZE,
            stat.as_mut_ptr(),
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so the kernel has filled it in.
    let stat = unsafe { stat.assume_init() };
    Ok(Stat {
        mode: stat.stx_mode.into(),
        bytes: stat.stx_size,
    })
}

/// Whether a file is a regular one of shmem (a memfd, tmpfs) or hugetlbfs: no
/// other file knows seals (`fcntl(2)`, F_GET_SEALS: EINVAL).
pub(crate) fn knows_seals(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: no pointers are passed, and `fd` is open.
    unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) >= 0 }
}

/// `fstatfs(2)`, for files whose file system is in the kernel: see
/// [`knows_seals`].
pub(crate) fn statfs(fd: BorrowedFd<'_>) -> io::Result<libc::statfs> {
    let mut statfs = MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: the kernel writes one `statfs` to memory that we own.
    if unsafe { libc::fstatfs(fd.as_raw_fd(), statfs.as_mut_ptr()) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so the kernel has filled it in.
    Ok(unsafe { statfs.assume_init() })
}

/// Name of the file system that an open file is on ("ext4", "fuse.sshfs");
/// `None` if `/proc` is not there, or the mount is not one of this process's.
pub(crate) fn file_system(fd: BorrowedFd<'_>) -> Option<String> {
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd())).ok()?;
    let id = info.lines().find_map(|line| line.strip_prefix("mnt_id:"))?;
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let mount = mounts
        .lines()
        .find(|mount| mount.split(' ').next() == Some(id.trim()))?;
    // proc_pid_mountinfo(5): the type is the first field behind the separator.
    let (_, behind) = mount.split_once(" - ")?;
    behind.split(' ').next().map(str::to_owned)
}

/// What `/proc` calls an open file: a path, or `anon_inode:[eventfd]` and the
/// like, which no path is. `None` if `/proc` is not there or the name is not text.
pub(crate) fn link(fd: BorrowedFd<'_>) -> Option<String> {
    let link = fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok()?;
    link.into_os_string().into_string().ok()
}

/// Whether a socket is a Unix one.
pub(crate) fn is_unix_socket(fd: BorrowedFd<'_>) -> bool {
    let mut domain: c_int = 0;
    let mut len = libc::socklen_t::try_from(size_of::<c_int>()).expect("4 bytes");
    // SAFETY: the kernel writes one `int` and one length, which we own.
    let result = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_DOMAIN,
            (&raw mut domain).cast(),
            &raw mut len,
        )
    };
    result == 0 && domain == libc::AF_UNIX
}

/// A kind of file by the format bits of its mode (`inode(7)`), for an operator.
pub(crate) fn kind(mode: libc::mode_t) -> &'static str {
    match mode & libc::S_IFMT {
        libc::S_IFREG => "a regular file",
        libc::S_IFDIR => "a directory",
        libc::S_IFCHR | libc::S_IFBLK => "a device",
        libc::S_IFIFO => "a pipe",
        libc::S_IFSOCK => "a socket",
        libc::S_IFLNK => "a symbolic link",
        _ => "no ordinary file",
    }
}
