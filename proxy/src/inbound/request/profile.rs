//! Finds the ServiceProfile of a request.

use std::sync::Arc;

use http::{Request, header, uri::Authority};
use tulle_core::{
    addr::{Addr, NameAddr},
    names::header as names,
};

use crate::{
    http::{body::Body, headers},
    inbound::{
        profiles::{ClientTrust, ProfileEntry},
        request::context::HttpConnection,
    },
};

/// The source of a request's profile name.
pub(super) enum ProfileNameSource {
    /// `l5d-dst-canonical`, set by the client's proxy.
    ClientHeader,
    /// The authority of the request.
    Authority,
}

impl HttpConnection {
    /// Finds the profile by `l5d-dst-canonical` if the client is meshed, otherwise by the authority of the request.
    pub(super) fn find_profile(&self, req: &Request<Body>) -> Option<(Arc<ProfileEntry>, ProfileNameSource)> {
        let meshed_id = self.client_id.as_ref();
        if let Some(name) = meshed_id.and_then(|_| headers::get(req.headers(), &names::L5D_DST_CANONICAL)) {
            let profile = self
                .inbound
                .profiles
                .get_or_watch(name.as_bytes(), ClientTrust::Trusted);
            return Some((profile.ok()??, ProfileNameSource::ClientHeader));
        }
        let authority = match req.uri().authority() {
            Some(authority) => authority.as_str().as_bytes(),
            None => headers::get(req.headers(), &header::HOST)?.as_bytes(),
        };
        if authority.len() > MAX_AUTHORITY_BYTES {
            return None;
        }
        let look_up = || {
            let trust = match meshed_id {
                Some(_) => ClientTrust::Trusted,
                None => ClientTrust::Untrusted,
            };
            let parsed = Authority::try_from(authority).ok();
            match parsed.as_ref().and_then(name_from_authority) {
                Some(name) => self.inbound.profiles.get_or_watch(name.to_string().as_bytes(), trust),
                None => Ok(None),
            }
        };
        let profile = self.cached_authority.lock().profile(authority, look_up)?;
        Some((profile, ProfileNameSource::Authority))
    }

    /// The value of the `authority` label: from `l5d-dst-canonical` if the client is meshed, otherwise from the authority of
    /// the request. Port 80 is left out.
    pub(super) fn authority_label(&self, req: &Request<Body>) -> Option<String> {
        let meshed_id = self.client_id.as_ref();
        let canonical = || req.headers().get(names::L5D_DST_CANONICAL)?.to_str().ok()?.parse().ok();
        let from_authority = || headers::authority(req).and_then(|authority| name_from_authority(&authority));
        let NameAddr { name, port } = meshed_id.and_then(|_| canonical()).or_else(from_authority)?;
        let name = name.trim_end_matches('.');
        Some(match port {
            80 => name.to_owned(),
            _ => format!("{name}:{port}"),
        })
    }
}

/// The name in an authority; `None` if it is an IP address or invalid.
fn name_from_authority(authority: &Authority) -> Option<NameAddr> {
    let port = authority.port_u16().unwrap_or(80);
    match format!("{}:{port}", authority.host()).parse() {
        Ok(Addr::Name(name)) => Some(name),
        Ok(Addr::Socket(_)) | Err(_) => None,
    }
}

/// Maximum length of an authority whose profile is looked up, in bytes: a DNS name, a colon and a port.
const MAX_AUTHORITY_BYTES: usize = 253 + 6;
