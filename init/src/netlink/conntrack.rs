//! Counts open connections that still need our rules.
//!
//! Messages and attributes: `linux/netfilter/nfnetlink_conntrack.h` and `nf_conntrack_common.h`.

use crate::netlink::attr::{self, Attrs};
use crate::netlink::socket::{Answer, Message, NFNL_SUBSYS_CTNETLINK, NetlinkError, Socket};
use crate::rules::TPROXY_CLIENT_MARK;

/// The number of open TCP connections that are redirected to one of these ports, or that the proxy dialled from its
/// client's address.
///
/// # Errors
/// If the kernel cannot list connections.
pub(crate) fn count_open(socket: &mut Socket, ports: &[u16]) -> Result<usize, NetlinkError> {
    // Kernels before 5.15 ignore these filters, so the results are filtered again below.
    let translated_filter = Attrs::new()
        .be32(CTA_STATUS, IPS_DST_NAT)
        .be32(CTA_STATUS_MASK, IPS_DST_NAT);
    let client_address_filter = Attrs::new()
        .be32(CTA_MARK, TPROXY_CLIENT_MARK)
        .be32(CTA_MARK_MASK, u32::MAX);
    let mut count = |attrs, needs_rules: &dyn Fn(&Answer) -> Option<bool>| {
        let request = Message {
            kind: NFNL_SUBSYS_CTNETLINK << 8 | IPCTNL_MSG_CT_GET,
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
    let n_translated = count(translated_filter, &|connection| is_translated(connection, ports))?;
    Ok(n_translated
        + count(client_address_filter, &|connection| {
            Some(attr::find_be32(&connection.attrs, CTA_MARK)? == TPROXY_CLIENT_MARK)
        })?)
}

fn is_open(connection: &Answer) -> Option<bool> {
    let tcp = attr::find(attr::find(&connection.attrs, CTA_PROTOINFO)?, CTA_PROTOINFO_TCP)?;
    let state = *attr::find(tcp, CTA_PROTOINFO_TCP_STATE)?.first()?;
    Some(!CLOSED_TCP_STATES.contains(&state))
}

fn is_translated(connection: &Answer, ports: &[u16]) -> Option<bool> {
    let status = attr::find_be32(&connection.attrs, CTA_STATUS)?;
    let replies = attr::find(attr::find(&connection.attrs, CTA_TUPLE_REPLY)?, CTA_TUPLE_PROTO)?;
    let port = attr::find_be16(replies, CTA_PROTO_SRC_PORT)?;
    Some(status & IPS_DST_NAT != 0 && ports.contains(&port))
}

const IPCTNL_MSG_CT_GET: u16 = 1;
const CTA_TUPLE_REPLY: u16 = 2;
const CTA_STATUS: u16 = 3;
const CTA_MARK: u16 = 8;
const CTA_MARK_MASK: u16 = 21;
const CTA_STATUS_MASK: u16 = 26;
const CTA_PROTOINFO: u16 = 4;
const CTA_TUPLE_PROTO: u16 = 2;
const CTA_PROTO_SRC_PORT: u16 = 2;
const CTA_PROTOINFO_TCP: u16 = 1;
const CTA_PROTOINFO_TCP_STATE: u16 = 1;
const IPS_DST_NAT: u32 = 1 << 5;
/// `TCP_CONNTRACK_TIME_WAIT` and `TCP_CONNTRACK_CLOSE`: no more data follows.
const CLOSED_TCP_STATES: [u8; 2] = [7, 8];
