//! Our capabilities: makes use of those that we may hold, and hands them on to the programs we start.

use nix::libc;
use nix::unistd::Uid;

/// Makes programs that this thread starts inherit `NET_ADMIN` and `NET_RAW`, as far as we hold them.
///
/// A user other than root loses capabilities when it starts a program that has none in its file. Without the ambient
/// set (before Linux 4.3) nothing happens here, and the program says what it lacks.
pub fn raise_ambient() {
    if Uid::effective().is_root() {
        return;
    }
    let mut sets = [Sets::default(); 2];
    if capability_call(libc::SYS_capget, &mut sets) {
        sets[0].inheritable |= sets[0].permitted & (1 << NET_ADMIN | 1 << NET_RAW);
        capability_call(libc::SYS_capset, &mut sets);
        raise(NET_ADMIN);
        raise(NET_RAW);
    }
}

/// Makes `NET_RAW` effective for this thread, and for those that it starts, as far as we hold it.
///
/// A program that is to start without the capability as well cannot have it from its file at once, but may take it.
pub fn use_net_raw() {
    let mut sets = [Sets::default(); 2];
    if capability_call(libc::SYS_capget, &mut sets) {
        sets[0].effective |= sets[0].permitted & (1 << NET_RAW);
        capability_call(libc::SYS_capset, &mut sets);
    }
}

/// Whether this thread may change rules, as far as capabilities say.
pub fn has_net_admin() -> bool {
    let mut sets = [Sets::default(); 2];
    capability_call(libc::SYS_capget, &mut sets) && sets[0].effective & (1 << NET_ADMIN) != 0
}

/// The kernel's `__user_cap_data_struct`, one for each half of the capabilities.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct Sets {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Reads or writes the sets of this thread; says whether that worked.
#[allow(unsafe_code)]
fn capability_call(call: libc::c_long, sets: &mut [Sets; 2]) -> bool {
    let header = [VERSION_3, 0];
    // SAFETY: both calls take a header of two words (version, and thread 0: this one) and, in version 3, two sets of
    // three words each, which they read or fill; both outlive the call.
    unsafe { libc::syscall(call, header.as_ptr(), sets.as_mut_ptr()) == 0 }
}

#[allow(unsafe_code)]
fn raise(capability: u32) {
    let none: libc::c_ulong = 0;
    // SAFETY: the call takes numbers alone.
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
