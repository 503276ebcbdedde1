//! Netlink sockets: requests, dumps, and atomic netfilter batches.

use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send, setsockopt, socket,
    sockopt,
};

use crate::netlink::attr::{self, Attrs};

/// A request to nftables, connection tracking or routing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    /// Subsystem (zero for routing) and operation.
    pub(crate) kind: u16,
    pub(crate) flags: u16,
    /// `NFPROTO_*`.
    pub(crate) family: u8,
    pub(crate) attrs: Attrs,
    /// A description of the request, for error texts.
    pub(crate) what: String,
}

/// One answer of the kernel: the attributes of an object, and its family.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) family: u8,
    pub(crate) attrs: Vec<u8>,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetlinkError {
    #[error("{doing} {subsystem} over netlink; {}", hint(*.source))]
    Socket {
        doing: &'static str,
        subsystem: &'static str,
        #[source]
        source: Errno,
    },
    #[error("the kernel refused {what}; {}", hint(*.source))]
    Refused {
        what: String,
        #[source]
        source: Errno,
    },
    #[error("another process changed rules at the same time; try again")]
    ConcurrentChange,
    #[error("parsing the kernel's answer about {what} failed")]
    Malformed { what: String },
    #[error("the kernel did not acknowledge the transaction")]
    Unacknowledged,
}

/// Advice for an error number.
fn hint(errno: Errno) -> &'static str {
    match errno {
        Errno::EPERM | Errno::EACCES => "the capability NET_ADMIN is missing",
        Errno::ENOENT | Errno::EOPNOTSUPP | Errno::EPROTONOSUPPORT | Errno::EAFNOSUPPORT => {
            "the kernel lacks a feature"
        }
        Errno::EMSGSIZE | Errno::ENOBUFS => "the rules exceed the maximum size of the socket buffer",
        _ => "see the cause",
    }
}

impl NetlinkError {
    /// The error number, if the kernel sent one.
    pub(crate) fn errno(&self) -> Option<Errno> {
        match self {
            Self::Socket { source, .. } | Self::Refused { source, .. } => Some(*source),
            Self::ConcurrentChange | Self::Malformed { .. } | Self::Unacknowledged => None,
        }
    }

    /// Whether another backend may work: the kernel lacks a feature, and it is not a matter of permission.
    pub(crate) fn is_unsupported(&self) -> bool {
        let lacking = [
            Errno::ENOENT,
            Errno::EOPNOTSUPP,
            Errno::EPROTONOSUPPORT,
            Errno::EAFNOSUPPORT,
        ];
        self.errno().is_some_and(|errno| lacking.contains(&errno))
    }
}

/// A netlink socket of the current network namespace.
#[derive(Debug)]
pub struct Socket {
    /// The kernel subsystem, for error texts.
    subsystem: &'static str,
    fd: OwnedFd,
    sequence: u32,
    buffer: Vec<u8>,
}

impl Socket {
    /// A socket for nftables and connection tracking.
    ///
    /// # Errors
    /// If the kernel has no netfilter over netlink.
    pub fn open() -> Result<Self, NetlinkError> {
        Self::open_protocol(SockProtocol::NetlinkNetFilter, "netfilter")
    }

    /// A socket for routes and routing rules.
    ///
    /// # Errors
    /// If the kernel has no netlink.
    pub(crate) fn open_routing() -> Result<Self, NetlinkError> {
        Self::open_protocol(SockProtocol::NetlinkRoute, "routing")
    }

    fn open_protocol(protocol: SockProtocol, subsystem: &'static str) -> Result<Self, NetlinkError> {
        let failed = |source| NetlinkError::Socket {
            doing: "opening",
            subsystem,
            source,
        };
        let fd = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol).map_err(failed)?;
        bind(fd.as_raw_fd(), &NetlinkAddr::new(0, 0)).map_err(failed)?;
        // A batch is sent in one call. Only root of the initial user namespace may exceed the system's limit for socket
        // buffers.
        let enlarged = setsockopt(&fd, sockopt::SndBufForce, &MAX_BATCH_BYTES);
        if enlarged.is_err() {
            setsockopt(&fd, sockopt::SndBuf, &MAX_BATCH_BYTES).map_err(failed)?;
        }
        Ok(Self {
            subsystem,
            fd,
            sequence: 0,
            buffer: vec![0; RECEIVE_BUFFER_BYTES],
        })
    }

    /// All objects that match a request.
    ///
    /// A subsystem that the kernel lacks has no objects.
    pub(crate) fn dump(&mut self, request: &Message) -> Result<Vec<Answer>, NetlinkError> {
        loop {
            match self.dump_once(request) {
                Err(NetlinkError::ConcurrentChange) => continue, // ends when no process writes during a dump
                Err(NetlinkError::Refused {
                    source: Errno::ENOENT, ..
                }) => return Ok(Vec::new()),
                done => return done,
            }
        }
    }

    fn dump_once(&mut self, request: &Message) -> Result<Vec<Answer>, NetlinkError> {
        let dump = Message {
            flags: request.flags | NLM_F_DUMP,
            ..request.clone()
        };
        self.send(&self.encode(&[&dump], self.sequence))?;
        let expected = self.sequence;
        self.sequence += 1;
        let mut answers = Vec::new();
        let mut is_interrupted = false;
        loop {
            let len = self.receive(MsgFlags::empty())?;
            for (header, body) in frames(&self.buffer[..len]) {
                if header.sequence != expected {
                    continue;
                }
                is_interrupted |= header.flags & NLM_F_DUMP_INTR != 0;
                match header.kind {
                    NLMSG_DONE if is_interrupted => return Err(NetlinkError::ConcurrentChange),
                    NLMSG_DONE => return Ok(answers),
                    NLMSG_ERROR => return Err(refusal(&dump.what, body)),
                    _ => {
                        let malformed = || NetlinkError::Malformed {
                            what: dump.what.clone(),
                        };
                        let (generic, attrs) = body.split_at_checked(GENERIC_HEADER_LEN).ok_or_else(malformed)?;
                        answers.push(Answer {
                            family: generic[0],
                            attrs: attrs.to_vec(),
                        });
                    }
                }
            }
        }
    }

    /// Sends one change and waits for its acknowledgement.
    ///
    /// # Errors
    /// If the kernel refuses it.
    pub(crate) fn change(&mut self, message: &Message) -> Result<(), NetlinkError> {
        let acknowledged = Message {
            flags: message.flags | NLM_F_ACK,
            ..message.clone()
        };
        self.send(&self.encode(&[&acknowledged], self.sequence))?;
        let expected = self.sequence;
        self.sequence += 1;
        loop {
            let len = self.receive(MsgFlags::empty())?;
            for (header, body) in frames(&self.buffer[..len]) {
                if header.sequence == expected && header.kind == NLMSG_ERROR {
                    return acknowledgement(&message.what, body);
                }
            }
        }
    }

    /// The generation number of the rules in this namespace; it changes with every commit of any process.
    pub(crate) fn generation(&mut self) -> Result<u32, NetlinkError> {
        let request = Message {
            kind: NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_GETGEN,
            flags: 0,
            family: 0,
            attrs: Attrs::new(),
            what: "the generation of the rules".to_owned(),
        };
        self.send(&self.encode(&[&request], self.sequence))?;
        let expected = self.sequence;
        self.sequence += 1;
        loop {
            let len = self.receive(MsgFlags::empty())?;
            for (header, body) in frames(&self.buffer[..len]) {
                if header.sequence != expected {
                    continue;
                }
                if header.kind == NLMSG_ERROR {
                    return Err(refusal(&request.what, body));
                }
                let generation = body
                    .get(GENERIC_HEADER_LEN..)
                    .and_then(|attrs| attr::find_be32(attrs, NFTA_GEN_ID));
                return generation.ok_or_else(|| NetlinkError::Malformed {
                    what: request.what.clone(),
                });
            }
        }
    }

    /// Applies messages in one transaction, if the generation is unchanged.
    ///
    /// # Errors
    /// If the kernel refuses a message; the error is that of the first one, and nothing has changed.
    pub(crate) fn commit(&mut self, messages: &[Message], generation: u32) -> Result<(), NetlinkError> {
        let batch_message = |kind, attrs| Message {
            kind,
            flags: 0,
            family: 0,
            attrs,
            what: "the transaction".to_owned(),
        };
        let begin = batch_message(NFNL_MSG_BATCH_BEGIN, Attrs::new().be32(NFNL_BATCH_GENID, generation));
        let end = batch_message(NFNL_MSG_BATCH_END, Attrs::new());
        let Some((last, others)) = messages.split_last() else {
            return Ok(());
        };
        let last = Message {
            flags: last.flags | NLM_F_ACK,
            ..last.clone()
        };
        let all: Vec<&Message> = [&begin].into_iter().chain(others).chain([&last, &end]).collect();
        let first_sequence = self.sequence;
        let batch = self.encode(&all, first_sequence);
        self.sequence += u32::try_from(all.len()).unwrap_or(u32::MAX);
        self.send(&batch)?;
        // The kernel answers before `send` returns, so an answer that is missing now will not arrive later.
        let mut is_acknowledged = false;
        loop {
            let len = match self.receive(MsgFlags::MSG_DONTWAIT) {
                Err(NetlinkError::Socket {
                    source: Errno::EAGAIN, ..
                }) if is_acknowledged => return Ok(()),
                Err(NetlinkError::Socket {
                    source: Errno::EAGAIN, ..
                }) => return Err(NetlinkError::Unacknowledged),
                received => received?,
            };
            for (header, body) in frames(&self.buffer[..len]) {
                let index = usize::try_from(header.sequence.wrapping_sub(first_sequence)).unwrap_or(usize::MAX);
                let Some(message) = all.get(index).filter(|_| header.kind == NLMSG_ERROR) else {
                    continue;
                };
                match acknowledgement(&message.what, body) {
                    Ok(()) => is_acknowledged = true,
                    Err(NetlinkError::Refused {
                        source: Errno::ERESTART,
                        ..
                    }) => return Err(NetlinkError::ConcurrentChange),
                    // Later refusals are consequences of the first. They stay unread; the next request skips them by their
                    // sequence numbers.
                    Err(refusal) => return Err(refusal),
                }
            }
        }
    }

    fn encode(&self, messages: &[&Message], first_sequence: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (message, sequence) in messages.iter().zip(first_sequence..) {
            let attrs = message.attrs.as_bytes();
            let len = u32::try_from(HEADER_LEN + GENERIC_HEADER_LEN + attrs.len()).unwrap_or(u32::MAX);
            bytes.extend_from_slice(&len.to_ne_bytes());
            bytes.extend_from_slice(&message.kind.to_ne_bytes());
            bytes.extend_from_slice(&(message.flags | NLM_F_REQUEST).to_ne_bytes());
            bytes.extend_from_slice(&sequence.to_ne_bytes());
            bytes.extend_from_slice(&0_u32.to_ne_bytes());
            // Batch headers contain the subsystem; in other messages this field is zero.
            let resource = if matches!(message.kind, NFNL_MSG_BATCH_BEGIN | NFNL_MSG_BATCH_END) {
                NFNL_SUBSYS_NFTABLES
            } else {
                0
            };
            bytes.extend_from_slice(&[message.family, 0]);
            bytes.extend_from_slice(&resource.to_be_bytes());
            bytes.extend_from_slice(attrs);
        }
        bytes
    }

    fn send(&self, bytes: &[u8]) -> Result<(), NetlinkError> {
        let sent = send(self.fd.as_raw_fd(), bytes, MsgFlags::empty());
        sent.map(|_| ()).map_err(|source| NetlinkError::Socket {
            doing: "sending to",
            subsystem: self.subsystem,
            source,
        })
    }

    fn receive(&mut self, flags: MsgFlags) -> Result<usize, NetlinkError> {
        loop {
            match recv(self.fd.as_raw_fd(), &mut self.buffer, flags) {
                Err(Errno::EINTR) => {}
                received => {
                    return received.map_err(|source| NetlinkError::Socket {
                        doing: "receiving from",
                        subsystem: self.subsystem,
                        source,
                    });
                }
            }
        }
    }
}

struct Header {
    kind: u16,
    flags: u16,
    sequence: u32,
}

/// Splits received bytes into messages; stops at the first truncated one.
fn frames(mut bytes: &[u8]) -> impl Iterator<Item = (Header, &[u8])> {
    std::iter::from_fn(move || {
        let head: &[u8; HEADER_LEN] = bytes.first_chunk()?;
        let word = |at: usize| u32::from_ne_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let half = |at: usize| u16::from_ne_bytes([head[at], head[at + 1]]);
        let len = usize::try_from(word(0)).ok()?;
        let body = bytes.get(HEADER_LEN..len)?;
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((
            Header {
                kind: half(4),
                flags: half(6),
                sequence: word(8),
            },
            body,
        ))
    })
}

/// Parses an error message: success, or the reason for the refusal.
fn acknowledgement(what: &str, body: &[u8]) -> Result<(), NetlinkError> {
    match body.starts_with(&0_i32.to_ne_bytes()) {
        true => Ok(()),
        false => Err(refusal(what, body)),
    }
}

/// Parses the refusal in an error message.
fn refusal(what: &str, body: &[u8]) -> NetlinkError {
    match body.first_chunk::<4>().map(|code| i32::from_ne_bytes(*code)) {
        Some(code) => NetlinkError::Refused {
            what: what.to_owned(),
            source: Errno::from_raw(code.wrapping_neg()),
        },
        None => NetlinkError::Malformed { what: what.to_owned() },
    }
}

/// Subsystem numbers, in the upper byte of message types.
pub(crate) const NFNL_SUBSYS_NFTABLES: u16 = 10;
pub(crate) const NFNL_SUBSYS_CTNETLINK: u16 = 1;

pub(crate) const NLM_F_CREATE: u16 = 0x400;
pub(crate) const NLM_F_APPEND: u16 = 0x800;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_DUMP_INTR: u16 = 0x10;
const NLM_F_DUMP: u16 = 0x300;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NFNL_MSG_BATCH_BEGIN: u16 = 0x10;
const NFNL_MSG_BATCH_END: u16 = 0x11;
const NFNL_BATCH_GENID: u16 = 1;
const NFT_MSG_GETGEN: u16 = 16;
const NFTA_GEN_ID: u16 = 1;
const HEADER_LEN: usize = 16;
/// Length of family, version and resource id after each header.
const GENERIC_HEADER_LEN: usize = 4;
/// Maximum size of a batch. It is enough for about ten thousand networks.
const MAX_BATCH_BYTES: usize = 4 << 20;
/// Size of the receive buffer. The kernel sends at most 32 KiB in one part of a dump.
const RECEIVE_BUFFER_BYTES: usize = 128 << 10;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_bytes_are_split_without_a_panic(bytes: Vec<u8>) {
            for (header, body) in frames(&bytes) {
                prop_assert!(body.len() < bytes.len());
                if header.kind == NLMSG_ERROR {
                    let _ = refusal("x", body).to_string();
                }
            }
        }
    }
}
