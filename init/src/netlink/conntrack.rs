//! Counts open connections that still need our rules.

use crate::netlink::attr::{self, Attrs};
use crate::netlink::socket::{Answer, CONNTRACK, Message, NetlinkError, Socket};
use crate::rules::TPROXY_CLIENT_MARK;

/// The number of open TCP connections that are redirected to one of these ports, or that the proxy dialled from its
/// client's address.
///
/// # Errors
/// If the kernel cannot list connections.
pub(crate) fn count_open(socket: &mut Socket, ports: &[u16]) -> Result<usize, NetlinkError> {
    // Kernels before 5.15 ignore this filter, so the result is filtered again below.
    let translated = Attrs::new()
        .be32(STATUS, DESTINATION_TRANSLATED)
        .be32(STATUS_MASK, DESTINATION_TRANSLATED);
    let as_client = Attrs::new().be32(MARK, TPROXY_CLIENT_MARK).be32(MARK_MASK, u32::MAX);
    let mut count = |attrs, needs_rules: &dyn Fn(&Answer) -> Option<bool>| {
        let request = Message {
            kind: CONNTRACK << 8 | GET_CONNECTIONS,
            flags: 0,
            family: 0,
            attrs,
            what: "a listing of connections".to_owned(),
        };
        let connections = socket.dump(&request)?;
        let open = connections
            .iter()
            .filter(|connection| is_open(connection) == Some(true) && needs_rules(connection) == Some(true));
        Ok(open.count())
    };
    let translated = count(translated, &|connection| is_translated(connection, ports))?;
    Ok(translated
        + count(as_client, &|connection| {
            Some(attr::find_be32(&connection.attrs, MARK)? == TPROXY_CLIENT_MARK)
        })?)
}

fn is_open(connection: &Answer) -> Option<bool> {
    let tcp = attr::find(attr::find(&connection.attrs, PROTOCOL_INFO)?, TCP_INFO)?;
    let state = *attr::find(tcp, TCP_STATE)?.first()?;
    Some(!ENDED_STATES.contains(&state))
}

fn is_translated(connection: &Answer, ports: &[u16]) -> Option<bool> {
    let status = attr::find_be32(&connection.attrs, STATUS)?;
    let replies = attr::find(attr::find(&connection.attrs, REPLY_TUPLE)?, TUPLE_PROTOCOL)?;
    let port = attr::find_be16(replies, SOURCE_PORT)?;
    Some(status & DESTINATION_TRANSLATED != 0 && ports.contains(&port))
}

const GET_CONNECTIONS: u16 = 1;
const REPLY_TUPLE: u16 = 2;
const STATUS: u16 = 3;
const MARK: u16 = 8;
const MARK_MASK: u16 = 21;
const STATUS_MASK: u16 = 26;
const PROTOCOL_INFO: u16 = 4;
const TUPLE_PROTOCOL: u16 = 2;
const SOURCE_PORT: u16 = 2;
const TCP_INFO: u16 = 1;
const TCP_STATE: u16 = 1;
const DESTINATION_TRANSLATED: u32 = 1 << 5;
/// TIME_WAIT and CLOSE: no more data follows.
const ENDED_STATES: [u8; 2] = [7, 8];
