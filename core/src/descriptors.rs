//! How many files this process may have open, sockets included.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Raises the limit as far as we may, and tells it. What is lower than that is for programs that use `select(2)`, which we do not.
pub fn limit() -> usize {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else {
        return usize::MAX; // then there is none that the kernel knows of
    };
    let limit = match setrlimit(Resource::RLIMIT_NOFILE, hard, hard) {
        Ok(()) => hard,
        Err(error) => {
            tracing::warn!(%error, soft, hard, "the limit of open files cannot be raised");
            soft
        }
    };
    usize::try_from(limit).unwrap_or(usize::MAX)
}
