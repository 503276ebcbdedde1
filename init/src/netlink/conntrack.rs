//! Counts connections that rules of ours have translated and that are still open.

use crate::netlink::attr::{self, Attrs};
use crate::netlink::wire::{Answer, CONNTRACK, Message, Socket, WireError};

/// How many open TCP connections are translated to one of these ports.
///
/// # Errors
/// When the kernel cannot list connections.
pub(crate) fn translated(socket: &mut Socket, ports: &[u16]) -> Result<usize, WireError> {
    let request = Message {
        kind: CONNTRACK << 8 | GET_CONNECTIONS,
        flags: 0,
        family: 0,
        // The kernel leaves out the others; one before 5.15 does not, and then they are left out below.
        attrs: Attrs::new()
            .be32(STATUS, DESTINATION_TRANSLATED)
            .be32(STATUS_MASK, DESTINATION_TRANSLATED),
        what: "a listing of connections".to_owned(),
    };
    let connections = socket.dump(&request)?;
    Ok(connections
        .iter()
        .filter(|connection| is_open_and_translated(connection, ports) == Some(true))
        .count())
}

fn is_open_and_translated(connection: &Answer, ports: &[u16]) -> Option<bool> {
    let status = attr::find_be32(&connection.attrs, STATUS)?;
    let answering = attr::find(attr::find(&connection.attrs, REPLY_TUPLE)?, TUPLE_PROTOCOL)?;
    let port = attr::find_be16(answering, SOURCE_PORT)?;
    let tcp = attr::find(attr::find(&connection.attrs, PROTOCOL_INFO)?, TCP_INFO)?;
    let state = *attr::find(tcp, TCP_STATE)?.first()?;
    Some(status & DESTINATION_TRANSLATED != 0 && ports.contains(&port) && !OVER.contains(&state))
}

const GET_CONNECTIONS: u16 = 1;
const REPLY_TUPLE: u16 = 2;
const STATUS: u16 = 3;
const STATUS_MASK: u16 = 26;
const PROTOCOL_INFO: u16 = 4;
const TUPLE_PROTOCOL: u16 = 2;
const SOURCE_PORT: u16 = 2;
const TCP_INFO: u16 = 1;
const TCP_STATE: u16 = 1;
const DESTINATION_TRANSLATED: u32 = 1 << 5;
/// Time-wait and close: neither side will send anything that matters.
const OVER: [u8; 2] = [7, 8];
