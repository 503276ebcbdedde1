//! Other listeners in this network namespace. A draining proxy uses this to learn whether its application still accepts
//! traffic.

use std::fs;

/// Kernel tables of the TCP sockets in this namespace.
const TABLES: [&str; 2] = ["/proc/net/tcp", "/proc/net/tcp6"];
/// `TCP_LISTEN` as the tables print it.
const TCP_LISTEN_STATE: &str = "0A";

/// True while a port outside `own` is listened on in this network namespace.
///
/// Returns false if the tables cannot be read, so that a drain always ends.
pub(crate) fn application_listens(own: &[u16]) -> bool {
    TABLES
        .iter()
        .filter_map(|table| fs::read_to_string(table).ok())
        .any(|text| listening_ports(&text).any(|port| !own.contains(&port)))
}

fn listening_ports(table: &str) -> impl Iterator<Item = u16> + '_ {
    table.lines().skip(1).filter_map(|line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let local = fields.next()?;
        let state = fields.nth(1)?;
        if state != TCP_LISTEN_STATE {
            return None;
        }
        u16::from_str_radix(local.rsplit(':').next()?, 16).ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n   \
        0: 00000000:102F 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0\n   \
        1: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0\n   \
        2: 0100007F:0050 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        0 1 1 0 100 0 0 10 0\n";

    #[test]
    fn only_listening_sockets_count() {
        assert_eq!(listening_ports(TABLE).collect::<Vec<_>>(), [0x102F, 0x1F90]);
    }

    #[test]
    fn nonsense_is_skipped() {
        assert_eq!(listening_ports("head\nx\n 1: zz 0 0A\n\u{1F600} y:z q 0A").count(), 0);
    }
}
