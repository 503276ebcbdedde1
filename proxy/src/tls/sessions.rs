//! TLS sessions that this proxy resumes as a client.

use std::collections::VecDeque;
use std::sync::Arc;

use arc_swap::ArcSwapOption;
use parking_lot::Mutex;
use rustls::client::{ClientSessionStore, Resumption, TicketRequest, Tls12ClientSessionValue, Tls13ClientSessionValue};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, NamedGroup};

/// TLS sessions that one endpoint lets this proxy resume, which saves the signatures of a handshake.
///
/// After either side has got a new certificate or new trust anchors, they cannot be resumed: the next handshake is a full one.
#[derive(Default)]
pub(crate) struct EndpointSessions {
    config: ArcSwapOption<ConfigWithSessions>,
}

struct ConfigWithSessions {
    /// The configuration of the credentials, from which `config` was copied.
    without_sessions: Arc<ClientConfig>,
    config: Arc<ClientConfig>,
}

/// The sessions of one endpoint. The store of rustls is not used: it distinguishes servers by their names, so it would mix the
/// sessions of endpoints with the same identity, and it has at most eight sessions for each name.
#[derive(Debug, Default)]
struct StoredSessions(Mutex<VecDeque<Tls13ClientSessionValue>>);

impl EndpointSessions {
    /// The configuration with these sessions. All sessions are dropped if the credentials, and so the configuration
    /// `without_sessions`, have changed since the last call.
    pub(super) fn add_to(&self, without_sessions: Arc<ClientConfig>) -> Arc<ClientConfig> {
        if let Some(current) = &*self.config.load()
            && Arc::ptr_eq(&current.without_sessions, &without_sessions)
        {
            return current.config.clone();
        }
        let mut config = ClientConfig::clone(&without_sessions);
        config.resumption = Resumption::store(Arc::new(StoredSessions::default()));
        config.send_ticket_request = Some(TicketRequest {
            new_session_count: 1,
            resumption_count: 1,
        });
        let config = Arc::new(config);
        let current = ConfigWithSessions {
            without_sessions,
            config: config.clone(),
        };
        self.config.store(Some(Arc::new(current)));
        config
    }
}

impl ClientSessionStore for StoredSessions {
    fn insert_tls13_ticket(&self, _: ServerName<'static>, session: Tls13ClientSessionValue) {
        let mut sessions = self.0.lock();
        if sessions.len() == MAX_ENDPOINT_SESSIONS {
            sessions.pop_front();
        }
        sessions.push_back(session);
    }

    fn take_tls13_ticket(&self, _: &ServerName<'static>) -> Option<Tls13ClientSessionValue> {
        self.0.lock().pop_back()
    }

    /// The first group is always offered, so there is nothing to store.
    fn set_kx_hint(&self, _: ServerName<'static>, _: NamedGroup) {}

    fn kx_hint(&self, _: &ServerName<'_>) -> Option<NamedGroup> {
        None
    }

    /// Only TLS 1.3 is used.
    fn set_tls12_session(&self, _: ServerName<'static>, _: Tls12ClientSessionValue) {}

    fn tls12_session(&self, _: &ServerName<'_>) -> Option<Tls12ClientSessionValue> {
        None
    }

    fn remove_tls12_session(&self, _: &ServerName<'static>) {}
}

/// A connection uses up one stored session and receives a new one. So this many connections can be resumed at the same time;
/// further ones do a full handshake.
const MAX_ENDPOINT_SESSIONS: usize = 64;
