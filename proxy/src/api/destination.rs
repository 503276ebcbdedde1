//! Endpoints and profiles, from the destination service.

use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;

use ipnet::IpNet;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tonic::Code;
use tulle_core::addr::Addr;
use tulle_core::backoff::Backoff;
use tulle_proto::destination as proto;
use tulle_proto::destination::destination_client::DestinationClient;

use crate::api::channel::{Channel, MESSAGE_LIMIT, Security};
use crate::api::retry::RetrySignal;
use crate::api::watch::{self as stream, Position, StreamLimits, Terms, Watched};

/// DNS names by their last labels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Suffixes {
    /// In lower case, without dots around; the empty one holds every name.
    suffixes: Vec<String>,
}

/// Targets that may have a profile.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProfileScope {
    pub suffixes: Suffixes,
    pub networks: Vec<IpNet>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{suffix:?} is not a DNS suffix; expected a comma list of DNS suffixes such as svc.cluster.local. or . for all"
)]
pub struct ParseSuffixesError {
    suffix: String,
}

/// A client of the destination service; clones share its channel.
#[derive(Clone)]
pub(crate) struct Destinations {
    client: DestinationClient<Channel>,
    shared: Arc<Shared>,
}

/// What every lookup has in common.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// Sent verbatim, so that the control plane knows who asks.
    pub context_token: String,
    pub profiles: ProfileScope,
    /// They do not hold for a control plane on this machine.
    pub limits: StreamLimits,
    pub backoff: Backoff,
}

struct Shared {
    channel: Channel,
    config: Config,
    runtime: Handle,
}

impl Suffixes {
    pub fn contain(&self, name: &str) -> bool {
        let name = name.trim_end_matches('.').to_ascii_lowercase();
        self.suffixes
            .iter()
            .any(|suffix| match name.strip_suffix(suffix.as_str()) {
                Some(rest) => suffix.is_empty() || rest.is_empty() || rest.ends_with('.'),
                None => false,
            })
    }

    pub fn is_empty(&self) -> bool {
        self.suffixes.is_empty()
    }
}

impl FromStr for Suffixes {
    type Err = ParseSuffixesError;

    fn from_str(text: &str) -> Result<Self, ParseSuffixesError> {
        let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
        let suffixes = parts.map(|part| {
            let suffix = part.strip_suffix('.').unwrap_or(part).to_ascii_lowercase();
            let label = |label: &str| {
                !label.is_empty()
                    && label
                        .bytes()
                        .all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
            };
            match part == "." || suffix.split('.').all(label) {
                true => Ok(suffix),
                false => Err(ParseSuffixesError {
                    suffix: part.to_owned(),
                }),
            }
        });
        Ok(Self {
            suffixes: suffixes.collect::<Result<_, _>>()?,
        })
    }
}

impl ProfileScope {
    pub fn contains(&self, target: &Addr) -> bool {
        match target {
            Addr::Name(name) => self.suffixes.contain(&name.name),
            Addr::Socket(addr) => self.contains_ip(addr.ip().to_canonical()),
        }
    }

    fn contains_ip(&self, ip: IpAddr) -> bool {
        self.networks.iter().any(|network| network.contains(&ip))
    }
}

impl Destinations {
    pub(crate) fn new(channel: Channel, runtime: Handle, mut config: Config) -> Self {
        if channel.target().security == Security::Loopback {
            config.limits = StreamLimits::default();
        }
        Self {
            client: DestinationClient::new(channel.clone()).max_decoding_message_size(MESSAGE_LIMIT),
            shared: Arc::new(Shared {
                channel,
                config,
                runtime,
            }),
        }
    }

    /// Whether a target may have a profile.
    pub(crate) fn may_have_profile(&self, target: &Addr) -> bool {
        self.shared.config.profiles.contains(target)
    }

    /// Whether the control plane can be asked.
    pub(crate) fn can_answer(&self) -> bool {
        !self.shared.channel.is_failing()
    }

    /// Watches the profile of a target; `None` where there cannot be one.
    ///
    /// Refused, there is none as of now; with `FailedPrecondition` the control plane cannot say whose the address is.
    pub(crate) fn profile<T: Send + Sync + 'static>(
        &self,
        target: &Addr,
        mut decode: impl FnMut(proto::DestinationProfile) -> T + Send + 'static,
    ) -> Option<watch::Receiver<Watched<T>>> {
        if !self.shared.config.profiles.contains(target) {
            return None;
        }
        let (client, req) = (self.client.clone(), self.request(target.to_string()));
        let open = move || {
            let (mut client, req) = (client.clone(), req.clone());
            async move { client.get_profile(req).await }
        };
        let terms = self.terms(format!("profile of {target}"), PROFILE_REFUSALS);
        Some(stream::spawn(&self.shared.runtime, terms, open, move |_, message| {
            decode(message)
        }))
    }

    /// Watches the endpoints behind a path, `name:port` as the control plane wrote it.
    ///
    /// The stream is incremental: `decode` keeps the set, and starts over at [`Position::First`].
    pub(crate) fn endpoints<T: Send + Sync + 'static>(
        &self,
        path: &str,
        decode: impl FnMut(Position, proto::Update) -> T + Send + 'static,
    ) -> watch::Receiver<Watched<T>> {
        let (client, req) = (self.client.clone(), self.request(path.to_owned()));
        let open = move || {
            let (mut client, req) = (client.clone(), req.clone());
            async move { client.get(req).await }
        };
        stream::spawn(
            &self.shared.runtime,
            self.terms(format!("endpoints of {path}"), ENDPOINT_REFUSALS),
            open,
            decode,
        )
    }

    fn request(&self, path: String) -> proto::GetDestination {
        let context_token = self.shared.config.context_token.clone();
        proto::GetDestination {
            path,
            context_token,
            ..Default::default()
        }
    }

    fn terms(&self, what: String, refusals: &'static [Code]) -> Terms {
        let Config { limits, backoff, .. } = &self.shared.config;
        Terms {
            channel: self.shared.channel.clone(),
            what,
            limits: *limits,
            backoff: *backoff,
            retry: RetrySignal::default(),
            refusals,
        }
    }
}

/// A name that is not served has no profile; neither has one of which the control plane knows nothing.
const PROFILE_REFUSALS: &[Code] = &[
    Code::InvalidArgument,
    Code::FailedPrecondition,
    Code::NotFound,
    Code::Unimplemented,
];
const ENDPOINT_REFUSALS: &[Code] = &[Code::InvalidArgument, Code::FailedPrecondition, Code::Unimplemented];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suffixes_hold_whole_labels() {
        for (suffixes, name, expected) in [
            ("svc.cluster.local.", "web.shop.svc.cluster.local", true),
            ("svc.cluster.local", "web.shop.SVC.cluster.local.", true),
            ("svc.cluster.local", "svc.cluster.local", true),
            ("svc.cluster.local", "web.xsvc.cluster.local", false),
            ("a.b,c.d", "x.c.d", true),
            (".", "anything.example.com", true),
            ("", "web.shop.svc.cluster.local", false),
        ] {
            assert_eq!(
                suffixes.parse::<Suffixes>().unwrap().contain(name),
                expected,
                "{suffixes:?} {name}"
            );
        }
        for bad in ["a..b", "..", "a b"] {
            assert!(bad.parse::<Suffixes>().is_err(), "{bad}");
        }
    }

    #[test]
    fn profiles_are_asked_for_in_scope_only() {
        let scope = ProfileScope {
            suffixes: "svc.cluster.local.".parse().unwrap(),
            networks: vec!["10.0.0.0/8".parse().unwrap()],
        };
        for (target, expected) in [
            ("10.1.2.3:80", true),
            ("[::ffff:10.1.2.3]:80", true),
            ("192.168.0.1:80", false),
            ("web.shop.svc.cluster.local:80", true),
            ("example.com:80", false),
        ] {
            assert_eq!(scope.contains(&target.parse().unwrap()), expected, "{target}");
        }
    }
}
