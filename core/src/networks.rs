//! Sets of networks in CIDR notation.

use std::net::IpAddr;

use ipnet::IpNet;

/// A network with exceptions.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NetworkMatch {
    pub net: IpNet,
    pub except: Vec<IpNet>,
}

/// The text is not a list of networks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{part:?} is not a network; expected a comma-separated list of CIDRs or addresses such as 10.0.0.0/8,fd00::1")]
pub struct ParseNetworksError {
    part: String,
}

/// Parses a comma-separated list of networks. An address without a prefix length is a network of one address.
///
/// # Errors
/// If an entry is neither a network nor an address; the error contains the first such entry.
pub fn parse_networks(text: &str) -> Result<Vec<IpNet>, ParseNetworksError> {
    if text.trim().is_empty() {
        return Ok(Vec::new());
    }
    text.split(',')
        .map(|part| {
            let trimmed = part.trim();
            trimmed
                .parse::<IpNet>()
                .or_else(|_| trimmed.parse::<IpAddr>().map(IpNet::from))
                .map_err(|_| ParseNetworksError { part: part.to_owned() })
        })
        .collect()
}

impl NetworkMatch {
    /// Whether the address is in the network and in none of the exceptions.
    ///
    /// An IPv4-mapped IPv6 address counts as IPv4.
    pub fn contains(&self, ip: IpAddr) -> bool {
        let ip = ip.to_canonical();
        self.net.contains(&ip) && !self.except.iter().any(|except| except.contains(&ip))
    }
}

impl From<IpNet> for NetworkMatch {
    fn from(net: IpNet) -> Self {
        Self {
            net,
            except: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_contain_all_but_their_exceptions() {
        let net = NetworkMatch {
            net: "10.0.0.0/8".parse().unwrap(),
            except: parse_networks("10.1.0.0/16, 10.2.0.1").unwrap(),
        };
        for (ip, expected) in [
            ("10.0.0.1", true),
            ("::ffff:10.0.0.1", true),
            ("10.1.2.3", false),
            ("10.2.0.1", false),
            ("11.0.0.1", false),
            ("fd00::1", false),
        ] {
            assert_eq!(net.contains(ip.parse().unwrap()), expected, "{ip}");
        }
    }

    #[test]
    fn a_bad_network_is_refused_and_named() {
        assert_eq!(parse_networks(" "), Ok(Vec::new()));
        for text in ["10.0.0.0/33", "10.0.0.0/8,", "localhost"] {
            assert!(parse_networks(text).is_err(), "{text}");
        }
        assert!(
            parse_networks("10.0.0.0/8,x")
                .unwrap_err()
                .to_string()
                .starts_with("\"x\" is not a network")
        );
    }
}
