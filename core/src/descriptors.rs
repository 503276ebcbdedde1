//! Limit of open files of this process, sockets included.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Raises the soft limit of open files (`RLIMIT_NOFILE`) to the hard limit and returns it.
///
/// The soft limit is low by default, for programs that use `select(2)`; tulle does not use `select`.
pub fn raise_limit() -> usize {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else {
        return usize::MAX; // the limit is unknown; assume that there is none
    };
    let limit = match setrlimit(Resource::RLIMIT_NOFILE, hard, hard) {
        Ok(()) => hard,
        Err(error) => {
            tracing::warn!(%error, soft, hard, "raising the limit of open files failed");
            soft
        }
    };
    usize::try_from(limit).unwrap_or(usize::MAX)
}
