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

use crate::api::channel::{Channel, IdentityCheck, MAX_MESSAGE_BYTES, Security};
use crate::api::retry_signal::RetrySignal;
use crate::api::watch::{Position, StreamLimits, WatchParams, WatchState, spawn_watch};

/// DNS suffixes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Suffixes {
    /// In lower case, without leading or trailing dot; the empty suffix matches every name.
    suffixes: Vec<String>,
}

/// The targets that may have a profile.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProfileScope {
    pub suffixes: Suffixes,
    pub networks: Vec<IpNet>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{suffix:?} is not a DNS suffix; expected a comma-separated list of DNS suffixes, such as 'svc.cluster.local', or '.' for all"
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

/// Settings of all lookups.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// Text that identifies this workload to the control plane; it is sent unchanged.
    pub context_token: String,
    pub profiles: ProfileScope,
    /// Limits of streams; not used for a control plane on this host.
    pub limits: StreamLimits,
    pub backoff: Backoff,
}

struct Shared {
    channel: Channel,
    config: Config,
    runtime: Handle,
}

impl Suffixes {
    /// Whether `name` has one of the suffixes.
    pub fn matches(&self, name: &str) -> bool {
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
            Addr::Name(name) => self.suffixes.matches(&name.name),
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
            client: DestinationClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE_BYTES),
            shared: Arc::new(Shared {
                channel,
                config,
                runtime,
            }),
        }
    }

    pub(crate) fn may_have_profile(&self, target: &Addr) -> bool {
        self.shared.config.profiles.contains(target)
    }

    pub(crate) fn is_reachable(&self) -> bool {
        !self.shared.channel.is_failing()
    }

    /// Watches the profile of a target; `None` if the target cannot have one.
    ///
    /// A refusal other than a denial means that there is no profile for now; with `FailedPrecondition`, several workloads have the
    /// address.
    pub(crate) fn profile<T: Send + Sync + 'static>(
        &self,
        target: &Addr,
        mut decode: impl FnMut(proto::DestinationProfile) -> T + Send + 'static,
    ) -> Option<watch::Receiver<WatchState<T>>> {
        if !self.shared.config.profiles.contains(target) {
            return None;
        }
        let (client, req) = (self.client.clone(), self.request(target.to_string()));
        let open = move || {
            let (mut client, req) = (client.clone(), req.clone());
            async move { client.get_profile(req).await }
        };
        let params = self.watch_params(format!("profile of {target}"), PROFILE_REFUSAL_CODES);
        Some(spawn_watch(&self.shared.runtime, params, open, move |_, message| {
            decode(message)
        }))
    }

    /// Watches the endpoints of a path, `name:port` as the control plane wrote it.
    ///
    /// The stream is incremental: `decode` keeps the set of endpoints. At [`Position::First`] the stream starts over: endpoints
    /// that the next addition does not list are removed.
    pub(crate) fn endpoints<T: Send + Sync + 'static>(
        &self,
        path: &str,
        decode: impl FnMut(Position, proto::Update) -> T + Send + 'static,
    ) -> watch::Receiver<WatchState<T>> {
        let (client, req) = (self.client.clone(), self.request(path.to_owned()));
        let open = move || {
            let (mut client, req) = (client.clone(), req.clone());
            async move { client.get(req).await }
        };
        spawn_watch(
            &self.shared.runtime,
            self.watch_params(format!("endpoints of {path}"), ENDPOINT_REFUSAL_CODES),
            open,
            decode,
        )
    }

    fn request(&self, path: String) -> proto::GetDestination {
        let context_token = self.shared.config.context_token.clone();
        proto::GetDestination {
            path,
            context_token,
            accepts_fallback: true,
            ..Default::default()
        }
    }

    fn watch_params(&self, description: String, refusals: &'static [Code]) -> WatchParams {
        let Config { limits, backoff, .. } = &self.shared.config;
        WatchParams {
            channel: self.shared.channel.clone(),
            description,
            limits: *limits,
            backoff: *backoff,
            retry: RetrySignal::default(),
            identity_check: IdentityCheck::Namespace,
            refusal_codes: refusals,
        }
    }
}

/// Codes that count as refusals. `PERMISSION_DENIED` means that the proxy may not read the profile. The other codes mean that
/// there is no profile, because the name is not served or not known, or because several workloads have the address.
const PROFILE_REFUSAL_CODES: &[Code] = &[
    Code::InvalidArgument,
    Code::FailedPrecondition,
    Code::NotFound,
    Code::PermissionDenied,
    Code::Unimplemented,
];
const ENDPOINT_REFUSAL_CODES: &[Code] = &[
    Code::InvalidArgument,
    Code::FailedPrecondition,
    Code::PermissionDenied,
    Code::Unimplemented,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suffixes_match_whole_labels() {
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
                suffixes.parse::<Suffixes>().unwrap().matches(name),
                expected,
                "{suffixes:?} {name}"
            );
        }
        for bad in ["a..b", "..", "a b"] {
            assert!(bad.parse::<Suffixes>().is_err(), "{bad}");
        }
    }

    #[test]
    fn profiles_are_requested_in_scope_only() {
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
