//! Linux capabilities of this process, and those that it passes on to child processes.

use nix::libc;
use nix::unistd::Uid;

/// Raises `NET_ADMIN` and `NET_RAW` into the ambient set of this thread, if permitted, so that child processes inherit
/// them.
///
/// Without this, a user other than root loses its capabilities when it starts a program whose file has none. Before Linux
/// 4.3 there is no ambient set; then nothing happens, and the child process reports the missing capability.
pub fn raise_ambient() {
    if Uid::effective().is_root() {
        return;
    }
    let mut sets = [CapabilitySets::default(); 2];
    if capability_call(libc::SYS_capget, &mut sets) {
        sets[0].inheritable |= sets[0].permitted & (1 << NET_ADMIN | 1 << NET_RAW);
        capability_call(libc::SYS_capset, &mut sets);
        raise_ambient_capability(NET_ADMIN);
        raise_ambient_capability(NET_RAW);
    }
}

/// Makes `NET_RAW` effective for this thread and the threads that it starts, if it is in the permitted set.
///
/// The file of the proxy has `cap_net_raw` with the permitted bit only. With the effective bit, the kernel would refuse to start
/// it where the bounding set does not have the capability. So the program has to make the capability effective itself.
pub fn enable_net_raw() {
    let mut sets = [CapabilitySets::default(); 2];
    if capability_call(libc::SYS_capget, &mut sets) {
        sets[0].effective |= sets[0].permitted & (1 << NET_RAW);
        capability_call(libc::SYS_capset, &mut sets);
    }
}

/// Whether `NET_ADMIN` is effective for this thread.
pub fn has_net_admin() -> bool {
    let mut sets = [CapabilitySets::default(); 2];
    capability_call(libc::SYS_capget, &mut sets) && sets[0].effective & (1 << NET_ADMIN) != 0
}

/// The kernel's `__user_cap_data_struct`: one for each 32 bits of the capability sets.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct CapabilitySets {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Calls `capget` or `capset` for this thread; returns whether it succeeded.
#[allow(unsafe_code)]
fn capability_call(call: libc::c_long, sets: &mut [CapabilitySets; 2]) -> bool {
    let header = [VERSION_3, 0];
    // SAFETY: both calls take a header of two words (version, and thread 0: this one) and, in version 3, two sets of
    // three words each, which they read or fill; both outlive the call.
    unsafe { libc::syscall(call, header.as_ptr(), sets.as_mut_ptr()) == 0 }
}

#[allow(unsafe_code)]
fn raise_ambient_capability(capability: u32) {
    let none: libc::c_ulong = 0;
    // SAFETY: the call takes integer arguments only.
    unsafe {
        libc::prctl(
            libc::PR_CAP_AMBIENT,
            libc::PR_CAP_AMBIENT_RAISE as libc::c_ulong,
            libc::c_ulong::from(capability),
            none,
            none,
        );
    }
}

const VERSION_3: u32 = 0x2008_0522;
const NET_ADMIN: u32 = 12;
const NET_RAW: u32 = 13;
