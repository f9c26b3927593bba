//! The regions of guest memory that a frontend has shared.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use pollux_virtio::{GuestMemory, Region, RegionPlace};
use vhost::vhost_user::message::VhostUserMemoryRegion;

use super::error::RequestError;
use crate::status::MemoryStatus;

/// Most regions of SET_MEM_TABLE (specification, "Memory regions description").
pub(crate) const BASELINE_REGIONS: u32 = 8;
/// Memory slots with CONFIGURE_MEM_SLOTS: what QEMU asks for at most, as many as
/// KVM has.
pub(crate) const SLOTS_MAX: usize = 509;

/// Guest memory of a session, as a value: every change makes a new map, which
/// rings are moved to one by one.
#[derive(Debug, Default)]
pub(super) struct MemoryMap {
    current: Option<Arc<GuestMemory>>,
    any_memory: bool,
}

impl MemoryMap {
    pub(super) fn new(any_memory: bool) -> Self {
        Self {
            current: None,
            any_memory,
        }
    }

    /// The memory, if there is any.
    pub(super) fn get(&self) -> Option<&Arc<GuestMemory>> {
        self.current.as_ref()
    }

    pub(super) fn status(&self) -> Vec<MemoryStatus> {
        let regions = self.regions().iter();
        regions
            .map(|region| MemoryStatus {
                guest_addr: region.place().guest_addr,
                bytes: region.place().size,
            })
            .collect()
    }

    fn regions(&self) -> &[Region] {
        self.current.as_ref().map_or(&[], |memory| memory.regions())
    }

    /// SET_MEM_TABLE: these regions and no others.
    pub(super) fn replace(
        &mut self,
        table: &[VhostUserMemoryRegion],
        fds: &[OwnedFd],
    ) -> Result<(), RequestError> {
        let regions: Result<Vec<Region>, _> = table
            .iter()
            .zip(fds)
            .map(|(region, fd)| self.map(place_of(region), fd))
            .collect();
        self.current = Some(Arc::new(GuestMemory::new(regions?)?));
        Ok(())
    }

    /// ADD_MEM_REG.
    pub(super) fn add(
        &mut self,
        region: &VhostUserMemoryRegion,
        fd: &OwnedFd,
    ) -> Result<(), RequestError> {
        if self.regions().len() >= SLOTS_MAX {
            return Err(RequestError::SlotsFull);
        }
        let region = self.map(place_of(region), fd)?;
        let regions = self.regions().iter().cloned().chain([region]);
        self.current = Some(Arc::new(GuestMemory::new(regions)?));
        Ok(())
    }

    /// REM_MEM_REG: the region of this guest address, user address and size.
    pub(super) fn remove(&mut self, region: &VhostUserMemoryRegion) -> Result<(), RequestError> {
        let gone = place_of(region);
        let is_gone = |region: &Region| {
            let place = region.place();
            (place.guest_addr, place.user_addr, place.size)
                == (gone.guest_addr, gone.user_addr, gone.size)
        };
        if !self.regions().iter().any(is_gone) {
            return Err(RequestError::NoSuchRegion {
                guest_addr: gone.guest_addr,
            });
        }
        let left: Vec<Region> = self
            .regions()
            .iter()
            .filter(|region| !is_gone(region))
            .cloned()
            .collect();
        self.current = if left.is_empty() {
            None
        } else {
            Some(Arc::new(GuestMemory::new(left)?))
        };
        Ok(())
    }

    fn map(&self, place: RegionPlace, fd: &OwnedFd) -> Result<Region, RequestError> {
        if !self.any_memory {
            check_memory_file(fd.as_fd(), place.guest_addr)?;
        }
        Ok(Region::map(fd.as_fd(), place)?)
    }
}

/// Refuses memory in a file whose file system could stall whoever touches it:
/// with FUSE that may be a process of the frontend's.
pub(super) fn check_memory_file(fd: BorrowedFd<'_>, guest_addr: u64) -> Result<(), RequestError> {
    let found = match pollux_sys::memory_file(fd) {
        Ok(file) if file.is_memory() => return Ok(()),
        Ok(file) => file.to_string(),
        Err(error) => format!("unknown kind ({error})"),
    };
    Err(RequestError::MemoryFile { guest_addr, found })
}

fn place_of(region: &VhostUserMemoryRegion) -> RegionPlace {
    RegionPlace {
        guest_addr: region.guest_phys_addr,
        size: region.memory_size,
        user_addr: region.user_addr,
        file_offset: region.mmap_offset,
    }
}
