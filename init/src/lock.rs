//! One init at a time in a network namespace.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::thread;
use std::time::Duration;

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use tokio::time::Instant;

/// Held while rules are read and written; gone with the process and the programs it has started, however they end.
#[derive(Debug)]
pub struct Lock {
    _name: UnixListener,
}

/// Takes the lock of the current network namespace; `None` if another process keeps it for that long.
///
/// The lock is an abstract socket name: those belong to the network namespace, as the rules do, and need neither a
/// file system nor a permission.
///
/// # Errors
/// When sockets cannot be made at all.
pub fn take(wait: Duration) -> io::Result<Option<Lock>> {
    let name = SocketAddr::from_abstract_name(NAME)?;
    let deadline = Instant::now() + wait;
    loop {
        match UnixListener::bind_addr(&name) {
            Ok(name) => {
                // A program that writes rules goes on if we are killed, and nobody else may write meanwhile.
                fcntl(&name, FcntlArg::F_SETFD(FdFlag::empty()))?;
                return Ok(Some(Lock { _name: name }));
            }
            Err(error) if error.kind() != io::ErrorKind::AddrInUse => return Err(error),
            Err(_) if Instant::now() >= deadline => return Ok(None),
            Err(_) => thread::sleep(RETRY),
        }
    }
}

const NAME: &str = "tulle-init";
const RETRY: Duration = Duration::from_millis(5);
