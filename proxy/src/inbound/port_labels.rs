//! The ports that are metric labels. Clients choose the ports that they connect to, so the number of undeclared ports with a label
//! of their own is limited, separately for ports with and without a listener. All other ports share one label.

use std::{collections::HashSet, net::SocketAddr};

use parking_lot::Mutex;
use tulle_core::ports::PortSet;

/// The ports that the workload declares, and a bounded number of others.
pub(crate) struct PortLabels {
    declared: PortSet,
    undeclared: Mutex<UndeclaredPorts>,
    /// Whether an application listens on an address.
    is_listening: fn(SocketAddr) -> bool,
}

#[derive(Default)]
struct UndeclaredPorts {
    /// Ports on which an application has listened.
    with_listener: HashSet<u16>,
    /// Ports on which no application has listened. They have a separate limit, so that clients cannot use up the limit of the ports
    /// with a listener.
    without_listener: HashSet<u16>,
}

impl PortLabels {
    pub(crate) fn new(declared: PortSet, is_listening: fn(SocketAddr) -> bool) -> Self {
        Self {
            declared,
            undeclared: Mutex::default(),
            is_listening,
        }
    }

    /// The port in the labels of a connection to `target`: the port of `target`, or [`OTHER_PORTS`].
    pub(super) fn label(&self, target: SocketAddr) -> u16 {
        let port = target.port();
        if self.declared.contains(port) {
            return port;
        }
        {
            let undeclared = self.undeclared.lock();
            if undeclared.contains(port) {
                return port;
            }
            if undeclared.is_full() {
                return OTHER_PORTS;
            }
        }
        let has_listener = (self.is_listening)(target);
        let mut undeclared = self.undeclared.lock();
        let (ports, max_ports) = match has_listener {
            true => (&mut undeclared.with_listener, MAX_PORTS_WITH_LISTENER),
            false => (&mut undeclared.without_listener, MAX_PORTS_WITHOUT_LISTENER),
        };
        if ports.len() >= max_ports {
            return OTHER_PORTS;
        }
        ports.insert(port);
        port
    }
}

impl UndeclaredPorts {
    fn is_full(&self) -> bool {
        self.with_listener.len() >= MAX_PORTS_WITH_LISTENER && self.without_listener.len() >= MAX_PORTS_WITHOUT_LISTENER
    }

    fn contains(&self, port: u16) -> bool {
        self.with_listener.contains(&port) || self.without_listener.contains(&port)
    }
}

/// The label of all ports that have no label of their own. No connection has this port.
const OTHER_PORTS: u16 = 0;

/// Maximum number of undeclared ports with a listener that are labels. The value is that of `MAX_TRUSTED_HOSTS` in
/// `metrics/hosts.rs`, the limit of host names in labels.
const MAX_PORTS_WITH_LISTENER: usize = 1_000;
/// Maximum number of ports without a listener that are labels. The value is that of `MAX_UNTRUSTED_HOSTS` in `metrics/hosts.rs`.
const MAX_PORTS_WITHOUT_LISTENER: usize = 64;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn label(ports: &PortLabels, port: u16) -> u16 {
        ports.label(([10, 0, 0, 1], port).into())
    }

    #[test]
    fn scanned_ports_share_a_label_and_ports_of_the_application_keep_their_own() {
        let ports = PortLabels::new("8080,9000-9100".parse().unwrap(), |target| target.port() >= 65_500);
        let scan = || (1..=u16::MAX).map(|port| label(&ports, port)).collect::<BTreeSet<_>>();
        let (n_declared, n_with_listener) = (102, 36);
        let scanned = scan();
        assert_eq!(
            scanned.len(),
            n_declared + n_with_listener + MAX_PORTS_WITHOUT_LISTENER + 1
        );
        assert!(scanned.contains(&OTHER_PORTS));
        for port in [8080, 9000, 9100, 65_500, u16::MAX] {
            assert_eq!(label(&ports, port), port);
        }
        assert_eq!(label(&ports, 30_000), OTHER_PORTS);
        assert_eq!(scan(), scanned, "the ports stay");
    }

    #[test]
    fn the_number_of_ports_of_the_application_is_limited() {
        let ports = PortLabels::new(PortSet::default(), |_| true);
        let labels: BTreeSet<_> = (1..=u16::MAX).map(|port| label(&ports, port)).collect();
        assert_eq!(labels.len(), MAX_PORTS_WITH_LISTENER + 1);
    }
}
