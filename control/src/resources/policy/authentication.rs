//! `MeshTLSAuthentication` and `NetworkAuthentication`: sets of clients to which authorizations refer.

use serde::Deserialize;
use tulle_core::networks::NetworkMatch;

use crate::resources::meta::Meta;
use crate::resources::policy::reference::{MeshClient, RawNetwork, RawReference, RawResource, parse_networks};

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
    identity_refs: Option<Vec<RawReference>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::resources) struct NetworkSpec {
    networks: Vec<RawNetwork>,
}

impl MeshTlsAuthentication {
    pub(in crate::resources) fn from_raw(raw: RawResource<MeshTlsSpec>) -> Result<Self, String> {
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
                    clients.push(parse_identity_ref(reference, &meta)?);
                }
            }
            _ => {
                return Err(
                    "spec needs exactly one of identities and identityRefs, with at least one entry".to_owned(),
                );
            }
        }
        Ok(Self { meta, clients })
    }
}

fn parse_identity_ref(reference: &RawReference, meta: &Meta) -> Result<MeshClient, String> {
    if reference.is_kind("", "ServiceAccount") {
        Ok(MeshClient::ServiceAccount(reference.resolve(meta.namespace())))
    } else if reference.is_kind("", "Namespace") {
        match &reference.namespace {
            None => Ok(MeshClient::Namespace(reference.name.as_str().into())),
            Some(namespace) => Err(format!(
                "spec.identityRefs: a reference to a Namespace accepts no namespace field, found {namespace}"
            )),
        }
    } else {
        Err(reference.unsupported_kind_error("spec.identityRefs", "ServiceAccount, Namespace"))
    }
}

impl NetworkAuthentication {
    pub(in crate::resources) fn from_raw(raw: RawResource<NetworkSpec>) -> Result<Self, String> {
        if raw.spec.networks.is_empty() {
            return Err("spec.networks is empty; at least one network is needed".to_owned());
        }
        Ok(Self {
            meta: Meta::from_kubernetes(raw.metadata)?,
            networks: parse_networks(raw.spec.networks)?,
        })
    }
}
