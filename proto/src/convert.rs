//! Conversions between messages and the types of std for addresses, networks and durations.
//!
//! Conversions to messages cannot fail. Conversions from messages check everything, because peers send them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use ipnet::IpNet;

use crate::net::{IPv6, IpAddress, IpNetwork, TcpAddress, ip_address::Ip};

/// The message has an invalid value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConvertError {
    #[error("the address has no IP")]
    NoIp,
    #[error("port {0} is above 65535")]
    Port(u32),
    #[error("prefix length {prefix_len} does not fit {ip}")]
    PrefixLen { ip: IpAddr, prefix_len: u32 },
    #[error("duration of {seconds} s and {nanos} ns is negative or out of range")]
    Duration { seconds: i64, nanos: i32 },
}

/// Converts a duration to a message; longer durations become the longest that a message can carry.
pub fn wire_duration(duration: Duration) -> prost_types::Duration {
    let duration = duration.min(MAX_WIRE_DURATION);
    prost_types::Duration {
        seconds: i64::try_from(duration.as_secs()).expect("bounded above"),
        nanos: i32::try_from(duration.subsec_nanos()).expect("less than 1,000,000,000"),
    }
}

/// Maximum of `google.protobuf.Duration`, about 10 000 years. It can be added to any time without overflow.
const MAX_WIRE_DURATION: Duration = Duration::from_secs(315_576_000_000);

/// Converts a duration from a message; durations beyond the maximum become the maximum.
///
/// # Errors
/// If the duration is negative, or its nanoseconds are a second or more.
pub fn std_duration(duration: &prost_types::Duration) -> Result<Duration, ConvertError> {
    let parts = (u64::try_from(duration.seconds), u32::try_from(duration.nanos));
    match parts {
        (Ok(seconds), Ok(nanos @ ..1_000_000_000)) => Ok(Duration::new(seconds, nanos).min(MAX_WIRE_DURATION)),
        _ => Err(ConvertError::Duration {
            seconds: duration.seconds,
            nanos: duration.nanos,
        }),
    }
}

impl From<IpAddr> for IpAddress {
    fn from(ip: IpAddr) -> Self {
        let ip = match ip {
            IpAddr::V4(ip) => Ip::Ipv4(ip.to_bits()),
            IpAddr::V6(ip) => {
                let bits = ip.to_bits();
                Ip::Ipv6(IPv6 {
                    first: (bits >> 64) as u64,
                    last: bits as u64,
                })
            }
        };
        Self { ip: Some(ip) }
    }
}

impl TryFrom<IpAddress> for IpAddr {
    type Error = ConvertError;

    fn try_from(message: IpAddress) -> Result<Self, ConvertError> {
        match message.ip.ok_or(ConvertError::NoIp)? {
            Ip::Ipv4(bits) => Ok(Ipv4Addr::from_bits(bits).into()),
            Ip::Ipv6(IPv6 { first, last }) => {
                Ok(Ipv6Addr::from_bits((u128::from(first) << 64) | u128::from(last)).into())
            }
        }
    }
}

impl From<SocketAddr> for TcpAddress {
    fn from(addr: SocketAddr) -> Self {
        Self {
            ip: Some(addr.ip().into()),
            port: addr.port().into(),
        }
    }
}

impl TryFrom<TcpAddress> for SocketAddr {
    type Error = ConvertError;

    fn try_from(message: TcpAddress) -> Result<Self, ConvertError> {
        let ip = IpAddr::try_from(message.ip.ok_or(ConvertError::NoIp)?)?;
        let port = u16::try_from(message.port).map_err(|_| ConvertError::Port(message.port))?;
        Ok(Self::new(ip, port))
    }
}

impl From<IpNet> for IpNetwork {
    fn from(net: IpNet) -> Self {
        Self {
            ip: Some(net.addr().into()),
            prefix_len: net.prefix_len().into(),
        }
    }
}

impl TryFrom<IpNetwork> for IpNet {
    type Error = ConvertError;

    fn try_from(message: IpNetwork) -> Result<Self, ConvertError> {
        let ip = IpAddr::try_from(message.ip.ok_or(ConvertError::NoIp)?)?;
        let misfit = ConvertError::PrefixLen {
            ip,
            prefix_len: message.prefix_len,
        };
        let prefix_len = u8::try_from(message.prefix_len).map_err(|_| misfit.clone())?;
        Self::new(ip, prefix_len).map_err(|_| misfit)
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn addresses_networks_and_durations_survive_a_round_trip(addr: SocketAddr, prefix_len in 0u8..=32, nanos: u64) {
            // Messages have no scope id.
            let addr = SocketAddr::new(addr.ip(), addr.port());
            prop_assert_eq!(SocketAddr::try_from(TcpAddress::from(addr)), Ok(addr));
            let net = IpNet::new(addr.ip(), prefix_len).unwrap();
            prop_assert_eq!(IpNet::try_from(IpNetwork::from(net)), Ok(net));
            let duration = Duration::from_nanos(nanos);
            prop_assert_eq!(std_duration(&wire_duration(duration)), Ok(duration));
        }

        #[test]
        fn any_duration_of_a_message_can_be_added_to_the_time(
            seconds: i64,
            nanos: i32,
            plausible_nanos in -1_i32..=1_000_000_000,
        ) {
            for nanos in [nanos, plausible_nanos] {
                if let Ok(duration) = std_duration(&prost_types::Duration { seconds, nanos }) {
                    prop_assert!(duration <= MAX_WIRE_DURATION);
                    prop_assert!(SystemTime::now().checked_add(duration).is_some());
                }
            }
        }
    }

    #[test]
    fn the_first_octet_of_an_address_is_the_most_significant() {
        assert_eq!(
            IpAddress::from(IpAddr::from([10, 0, 0, 1])).ip,
            Some(Ip::Ipv4(0x0a00_0001))
        );
        let v6: IpAddr = "fd00::1".parse().unwrap();
        assert_eq!(
            IpAddress::from(v6).ip,
            Some(Ip::Ipv6(IPv6 {
                first: 0xfd00_0000_0000_0000,
                last: 1
            }))
        );
    }

    #[test]
    fn invalid_messages_are_refused() {
        let ip = IpAddress::from(IpAddr::from([10, 0, 0, 1]));
        assert_eq!(
            SocketAddr::try_from(TcpAddress { ip: None, port: 1 }),
            Err(ConvertError::NoIp)
        );
        assert_eq!(
            SocketAddr::try_from(TcpAddress {
                ip: Some(ip),
                port: 65536
            }),
            Err(ConvertError::Port(65536))
        );
        for prefix_len in [33, 256 + 8] {
            let err = IpNet::try_from(IpNetwork {
                ip: Some(ip),
                prefix_len,
            })
            .unwrap_err();
            assert_eq!(
                err.to_string(),
                format!("prefix length {prefix_len} does not fit 10.0.0.1")
            );
        }
        for (seconds, nanos) in [(-1, 0), (0, -1), (0, 1_000_000_000)] {
            assert!(std_duration(&prost_types::Duration { seconds, nanos }).is_err());
        }
        assert!(std_duration(&wire_duration(Duration::MAX)).is_ok());
        for (seconds, nanos) in [(i64::MAX, 0), (i64::MAX, 999_999_999), (315_576_000_000, 1)] {
            assert_eq!(
                std_duration(&prost_types::Duration { seconds, nanos }),
                Ok(MAX_WIRE_DURATION)
            );
        }
    }
}
