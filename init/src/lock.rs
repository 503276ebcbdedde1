//! A lock that allows one init at a time in a network namespace.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::thread;
use std::time::Duration;

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use tokio::time::Instant;

/// Held while rules are read and written. Released when it is dropped and the programs started meanwhile have ended.
#[derive(Debug)]
pub struct Lock {
    _listener: UnixListener,
}

/// Takes the lock of the current network namespace; `None` if another process holds it longer than `wait`.
///
/// The lock is an abstract socket address. Like the rules, such an address belongs to the network namespace; it needs neither a
/// file system nor permissions.
///
/// # Errors
/// If the socket cannot be created.
pub fn take(wait: Duration) -> io::Result<Option<Lock>> {
    let addr = SocketAddr::from_abstract_name(LOCK_SOCKET_NAME)?;
    let deadline = Instant::now() + wait;
    loop {
        match UnixListener::bind_addr(&addr) {
            Ok(listener) => {
                // Child processes inherit the lock, because they continue to write rules if this process is killed.
                fcntl(&listener, FcntlArg::F_SETFD(FdFlag::empty()))?;
                return Ok(Some(Lock { _listener: listener }));
            }
            Err(error) if error.kind() != io::ErrorKind::AddrInUse => return Err(error),
            Err(_) if Instant::now() >= deadline => return Ok(None),
            Err(_) => thread::sleep(RETRY_INTERVAL),
        }
    }
}

const LOCK_SOCKET_NAME: &str = "tulle-init";
const RETRY_INTERVAL: Duration = Duration::from_millis(5);
