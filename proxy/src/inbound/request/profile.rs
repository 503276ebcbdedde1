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
        request::context::{CachedAuthority, HttpConnection},
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
        let peer = self.client_id.as_ref();
        if let Some(name) = peer.and_then(|_| headers::get(req.headers(), &names::L5D_DST_CANONICAL)) {
            let profile = self
                .inbound
                .profiles
                .get_or_watch(name.as_bytes(), ClientTrust::Trusted);
            return profile.map(|profile| (profile, ProfileNameSource::ClientHeader));
        }
        let authority = match req.uri().authority() {
            Some(authority) => authority.as_str().as_bytes(),
            None => headers::get(req.headers(), &header::HOST)?.as_bytes(),
        };
        if authority.len() > MAX_AUTHORITY_BYTES {
            return None;
        }
        let mut cached = self.cached_authority.lock();
        if *cached.authority != *authority {
            let by = if peer.is_some() {
                ClientTrust::Trusted
            } else {
                ClientTrust::Untrusted
            };
            let name = Authority::try_from(authority)
                .ok()
                .as_ref()
                .and_then(name_from_authority);
            *cached = CachedAuthority {
                profile: name.and_then(|name| self.inbound.profiles.get_or_watch(name.to_string().as_bytes(), by)),
                authority: authority.into(),
            };
        }
        let profile = cached.profile.clone();
        profile.map(|profile| (profile, ProfileNameSource::Authority))
    }

    /// The value of the `authority` label: from `l5d-dst-canonical` if the client is meshed, otherwise from the authority of
    /// the request. Port 80 is left out.
    pub(super) fn authority_label(&self, req: &Request<Body>) -> Option<String> {
        let meshed = self.client_id.as_ref();
        let canonical = || req.headers().get(names::L5D_DST_CANONICAL)?.to_str().ok()?.parse().ok();
        let from_authority = || headers::authority(req).and_then(|authority| name_from_authority(&authority));
        let NameAddr { name, port } = meshed.and_then(|_| canonical()).or_else(from_authority)?;
        let name = name.trim_end_matches('.');
        Some(match port {
            80 => name.to_owned(),
            _ => format!("{name}:{port}"),
        })
    }
}

/// The name in an authority; `None` if it is an IP address.
fn name_from_authority(authority: &Authority) -> Option<NameAddr> {
    let port = authority.port_u16().unwrap_or(80);
    match format!("{}:{port}", authority.host()).parse() {
        Ok(Addr::Name(name)) => Some(name),
        Ok(Addr::Socket(_)) | Err(_) => None,
    }
}

/// Length of a DNS name, a colon and a port, in bytes.
const MAX_AUTHORITY_BYTES: usize = 253 + 6;
