//! `MeshTLSAuthentication` and `NetworkAuthentication`: sets of clients that authorizations refer to.

use serde::Deserialize;
use tulle_core::nets::NetworkMatch;

use crate::resources::meta::Meta;
use crate::resources::policy::reference::{MeshClient, Raw, RawNetwork, Reference, networks};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeshTlsAuthentication {
    pub meta: Meta,
    pub clients: Vec<MeshClient>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkAuthentication {
    pub meta: Meta,
    pub networks: Vec<NetworkMatch>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(in crate::resources) struct MeshTlsSpec {
    identities: Option<Vec<String>>,
    identity_refs: Option<Vec<Reference>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::resources) struct NetworkSpec {
    networks: Vec<RawNetwork>,
}

impl MeshTlsAuthentication {
    pub(in crate::resources) fn from_raw(raw: Raw<MeshTlsSpec>) -> Result<Self, String> {
        let meta = Meta::from_kubernetes(raw.metadata)?;
        let mut clients = Vec::new();
        match (raw.spec.identities, raw.spec.identity_refs) {
            (Some(identities), None) if !identities.is_empty() => {
                for identity in &identities {
                    clients.push(MeshClient::parse(identity)?);
                }
            }
            (None, Some(references)) if !references.is_empty() => {
                for reference in &references {
                    clients.push(identity_ref(reference, &meta)?);
                }
            }
            _ => {
                return Err("spec needs exactly one of identities and identityRefs, with one entry or more".to_owned());
            }
        }
        Ok(Self { meta, clients })
    }
}

fn identity_ref(reference: &Reference, meta: &Meta) -> Result<MeshClient, String> {
    if reference.is("", "ServiceAccount") {
        Ok(MeshClient::ServiceAccount(reference.resolve(meta.namespace())))
    } else if reference.is("", "Namespace") {
        match &reference.namespace {
            None => Ok(MeshClient::Namespace(reference.name.as_str().into())),
            Some(namespace) => Err(format!(
                "spec.identityRefs: a Namespace reference has no namespace of its own, found {namespace}"
            )),
        }
    } else {
        Err(reference.refused("spec.identityRefs", "ServiceAccount, Namespace"))
    }
}

impl NetworkAuthentication {
    pub(in crate::resources) fn from_raw(raw: Raw<NetworkSpec>) -> Result<Self, String> {
        if raw.spec.networks.is_empty() {
            return Err("spec.networks is empty; at least one network is needed".to_owned());
        }
        Ok(Self {
            meta: Meta::from_kubernetes(raw.metadata)?,
            networks: networks(raw.spec.networks)?,
        })
    }
}
