//! The live policy of each port: watched while the port is in use, the environment's default until it is known.

use std::{collections::HashMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{sync::watch, time::Instant};
use tulle_core::ports::PortSet;

use crate::{
    api::{policies::Policies, watch::Watched},
    net::first::Learned,
    policy::{
        decode,
        rate_limit::Limiter,
        server::{ServerHttp, ServerPolicy, ServerProtocol},
    },
};

/// The policies of all ports that were asked for.
pub(crate) struct Ports {
    policies: Policies,
    defaults: Defaults,
    /// Ports that stay watched.
    kept: PortSet,
    idle: Duration,
    known: Mutex<HashMap<u16, (Arc<Port>, Instant)>>,
}

/// What holds for a port before the control plane has spoken.
pub(crate) struct Defaults {
    pub(crate) detect: Arc<Current>,
    pub(crate) opaque: Arc<Current>,
    pub(crate) opaque_ports: PortSet,
    /// For policies that cannot be decoded.
    pub(crate) detect_timeout: Duration,
}

/// One port of this workload.
pub(crate) struct Port {
    policy: watch::Receiver<Watched<Arc<Current>>>,
    default: Arc<Current>,
    /// Who speaks first inside TLS, and without it.
    pub(super) learned: [Learned; 2],
}

/// A policy and the state that lives as long as it holds.
pub(crate) struct Current {
    pub(super) policy: ServerPolicy,
    pub(super) limiter: Option<Arc<Limiter>>,
}

impl Current {
    pub(crate) fn new(policy: ServerPolicy) -> Arc<Self> {
        Self::after(None, policy)
    }

    /// A policy that takes the place of another: what stays the same goes on, and what was used of a rate limit is used.
    fn after(previous: Option<&Arc<Self>>, policy: ServerPolicy) -> Arc<Self> {
        if let Some(previous) = previous.filter(|previous| previous.policy == policy) {
            return previous.clone();
        }
        let limit = |policy: &ServerPolicy| policy.protocol.http().and_then(|http| http.rate_limit.clone());
        let limiter = limit(&policy).map(|new| {
            let kept = previous.filter(|previous| limit(&previous.policy).as_ref() == Some(&new));
            let kept = kept.and_then(|previous| previous.limiter.clone());
            kept.unwrap_or_else(|| Arc::new(Limiter::new(&new, Instant::now())))
        });
        Arc::new(Self { policy, limiter })
    }
}

impl ServerProtocol {
    /// The routes, for protocols that have them.
    pub(super) fn http(&self) -> Option<&ServerHttp> {
        match self {
            Self::Detect { http, .. } | Self::Http1(http) | Self::Http2(http) | Self::Grpc(http) => Some(http),
            Self::Opaque | Self::Tls => None,
        }
    }
}

impl Ports {
    pub(crate) fn new(policies: Policies, defaults: Defaults, kept: PortSet, idle: Duration) -> Self {
        let ports = Self {
            policies,
            defaults,
            kept,
            idle,
            known: Mutex::default(),
        };
        for port in ports.kept.ranges().flatten() {
            ports.get(port);
        }
        ports
    }

    /// The port, watched from now on until it has not been asked for in a while; nothing where as many others are in use as may be:
    /// clients may try every port, and each one that is watched costs the control plane something.
    pub(super) fn get(&self, port: u16) -> Option<Arc<Port>> {
        let now = Instant::now();
        let mut known = self.known.lock();
        if let Some((found, used)) = known.get_mut(&port) {
            *used = now;
            return Some(found.clone());
        }
        let is_free = |port: u16, found: &Arc<Port>| !self.kept.contains(port) && Arc::strong_count(found) == 1;
        // While the control plane cannot be asked again, what it has said is kept.
        let can_answer = self.policies.can_answer();
        if can_answer {
            known.retain(|port, (found, used)| !is_free(*port, found) || now.duration_since(*used) < self.idle);
        }
        let n_others = known.keys().filter(|port| !self.kept.contains(**port)).count();
        if n_others >= MOST_OTHERS && !self.kept.contains(port) {
            let free = known
                .iter()
                .filter(|(port, (found, _))| can_answer && is_free(**port, found));
            let (&longest_unused, _) = free.min_by_key(|(_, (_, used))| *used)?;
            known.remove(&longest_unused);
        }
        let made = Arc::new(self.watch(port));
        known.insert(port, (made.clone(), now));
        Some(made)
    }

    /// What `of` makes of each port in use.
    pub(super) fn each<T>(&self, of: impl Fn(u16, &Port) -> T) -> Vec<T> {
        self.known
            .lock()
            .iter()
            .map(|(number, (port, _))| of(*number, port))
            .collect()
    }

    fn watch(&self, port: u16) -> Port {
        let timeout = self.defaults.detect_timeout;
        let last = Mutex::new(None);
        let policy = self.policies.inbound(port, move |update| {
            let policy = decode::inbound::server_policy(update).unwrap_or_else(|error| {
                tracing::warn!(port, %error, "policy cannot be understood, nobody may use the port until it can");
                ServerPolicy::invalid(timeout)
            });
            let mut last = last.lock();
            let current = Current::after(last.as_ref(), policy);
            *last = Some(current.clone());
            current
        });
        let default = if self.defaults.opaque_ports.contains(port) {
            self.defaults.opaque.clone()
        } else {
            self.defaults.detect.clone()
        };
        Port {
            policy,
            default,
            learned: Default::default(),
        }
    }
}

impl Port {
    /// The policy in force.
    pub(super) fn current(&self) -> Arc<Current> {
        match &*self.policy.borrow() {
            Watched::Known(current) => current.clone(),
            // A workload that the control plane does not know has the default of its environment.
            Watched::Pending | Watched::Refused(_) => self.default.clone(),
        }
    }

    /// How the control plane has answered.
    pub(super) fn said(&self) -> Watched<()> {
        match &*self.policy.borrow() {
            Watched::Pending => Watched::Pending,
            Watched::Known(_) => Watched::Known(()),
            Watched::Refused(refusal) => Watched::Refused(refusal.clone()),
        }
    }

    /// Waits until another policy than `seen` is in force.
    pub(super) async fn changed_from(&self, seen: &Arc<Current>) -> Arc<Current> {
        let mut policy = self.policy.clone();
        loop {
            let current = self.current();
            if !Arc::ptr_eq(&current, seen) {
                return current;
            }
            if policy.changed().await.is_err() {
                std::future::pending::<()>().await; // the watch has ended; what is known stays
            }
        }
    }
}

/// Ports that are watched at a time beside those that stay watched.
const MOST_OTHERS: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{meta::Meta, rate_limit::RateLimit};

    #[test]
    fn what_was_used_of_a_rate_limit_stays_used_when_other_things_change() {
        let limited = |total, timeout| {
            let mut policy = ServerPolicy::invalid(Duration::from_secs(timeout));
            if let ServerProtocol::Detect { http, .. } = &mut policy.protocol {
                http.rate_limit = Some(Arc::new(RateLimit {
                    meta: Meta::default_named("limit"),
                    total: Some(total),
                    identity: None,
                    overrides: Vec::new(),
                }));
            }
            policy
        };
        let now = Instant::now();
        let is_free = |current: &Current| current.limiter.as_ref().unwrap().check(None, now).is_ok();
        let first = Current::new(limited(1, 1));
        assert!(is_free(&first) && !is_free(&first));
        let same = Current::after(Some(&first), limited(1, 1));
        assert!(Arc::ptr_eq(&same, &first));
        let changed = Current::after(Some(&first), limited(1, 2));
        assert!(!Arc::ptr_eq(&changed, &first) && !is_free(&changed));
        assert!(is_free(&Current::after(Some(&first), limited(2, 2))));
    }
}
