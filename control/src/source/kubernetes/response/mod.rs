//! Responses of the API server in JSON or protobuf: pages of lists, events of watches, errors. Objects are decoded one at a time.

mod frames;
mod object;
mod protobuf;

use bytes::Bytes;
use prost::Message;
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::{Error as UnknownVariant, StrDeserializer};
use serde_json::value::RawValue;

pub(super) use crate::source::kubernetes::response::frames::{FrameBuffer, WatchEncoding};
pub(super) use crate::source::kubernetes::response::object::{
    DecodeError, EncodedObject, ObjectHead, PartlyDecodedObject,
};

/// A page of a list.
pub(super) struct ListPage<'a> {
    pub(super) resource_version: String,
    /// The token of the next page. Empty on the last page.
    pub(super) next_page: String,
    pub(super) items: Vec<EncodedObject<'a>>,
}

impl<'a> ListPage<'a> {
    pub(super) fn parse(body: &'a Bytes) -> Result<Self, DecodeError> {
        if let Some(object) = protobuf::TypedObject::parse(body)? {
            if !object.kind.ends_with("List") {
                return Err(DecodeError::NotAList(object.kind));
            }
            let list = protobuf::List::decode(object.message)?;
            let metadata = list.metadata.unwrap_or_default();
            return Ok(Self {
                resource_version: metadata.resource_version,
                next_page: metadata.r#continue,
                items: list.items.into_iter().map(EncodedObject::Protobuf).collect(),
            });
        }
        let list: JsonList<'_> = serde_json::from_slice(body)?;
        Ok(Self {
            resource_version: list.metadata.resource_version,
            next_page: list.metadata.r#continue,
            items: list
                .items
                .unwrap_or_default()
                .into_iter()
                .map(EncodedObject::Json)
                .collect(),
        })
    }
}

#[derive(Deserialize)]
struct JsonList<'a> {
    metadata: JsonListMeta,
    /// `null` in an empty list of metadata. A response without this field is not a list.
    #[serde(borrow, deserialize_with = "Option::deserialize")]
    items: Option<Vec<&'a RawValue>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct JsonListMeta {
    resource_version: String,
    #[serde(default)]
    r#continue: String,
}

#[derive(Deserialize)]
pub(super) struct ApiGroupList {
    groups: Vec<ApiGroup>,
}

#[derive(Deserialize)]
struct ApiGroup {
    name: String,
    versions: Vec<GroupVersion>,
}

#[derive(Deserialize)]
struct GroupVersion {
    version: String,
}

/// The resources of one version of a group in discovery.
#[derive(Deserialize)]
pub(super) struct ApiResourceList {
    resources: Vec<ApiResource>,
}

#[derive(Deserialize)]
struct ApiResource {
    /// The plural name.
    name: String,
}

impl ApiGroupList {
    /// Returns the versions of a group, which are none if the group does not exist.
    pub(super) fn group_versions(self, name: &str) -> Vec<String> {
        let matching_groups = self.groups.into_iter().filter(|group| group.name == name);
        matching_groups
            .flat_map(|group| group.versions)
            .map(|version| version.version)
            .collect()
    }
}

impl ApiResourceList {
    pub(super) fn contains(&self, plural: &str) -> bool {
        self.resources.iter().any(|resource| resource.name == plural)
    }
}

pub(super) struct WatchEvent<'a> {
    pub(super) r#type: WatchEventType,
    pub(super) object: EncodedObject<'a>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub(super) enum WatchEventType {
    Added,
    Modified,
    Deleted,
    Bookmark,
    Error,
}

impl<'a> WatchEvent<'a> {
    pub(super) fn parse(frame: &'a Bytes, encoding: WatchEncoding) -> Result<Self, DecodeError> {
        match encoding {
            WatchEncoding::Json => {
                let JsonWatchEvent { r#type, object } = serde_json::from_slice(frame)?;
                let object = EncodedObject::Json(object);
                Ok(Self { r#type, object })
            }
            WatchEncoding::Protobuf => {
                let event = protobuf::WatchEvent::decode(frame.clone())?;
                let name: StrDeserializer<'_, UnknownVariant> = event.r#type.as_str().into_deserializer();
                let r#type = WatchEventType::deserialize(name).map_err(DecodeError::EventType)?;
                let object = event.object.unwrap_or_default().raw;
                let object = protobuf::TypedObject::parse(&object)?.ok_or(DecodeError::NotProtobuf)?;
                let object = EncodedObject::Protobuf(object.message);
                Ok(Self { r#type, object })
            }
        }
    }
}

#[derive(Deserialize)]
struct JsonWatchEvent<'a> {
    r#type: WatchEventType,
    #[serde(borrow)]
    object: &'a RawValue,
}

/// The body of an error response.
#[derive(Debug, Default, Deserialize)]
pub(super) struct StatusError {
    #[serde(default)]
    pub(super) code: u16,
    #[serde(default)]
    pub(super) message: String,
}

impl StatusError {
    /// Reads the body of a response. The body can be empty or unreadable, for example if a proxy between this process and the
    /// API server sent it.
    pub(super) fn from_body(body: &Bytes) -> Self {
        match protobuf::TypedObject::parse(body) {
            Ok(Some(object)) => Self::from_protobuf(object.message),
            _ => serde_json::from_slice(body).unwrap_or_default(),
        }
    }

    /// Reads the object of a watch event.
    pub(super) fn from_object(object: EncodedObject<'_>) -> Self {
        match object {
            EncodedObject::Json(object) => serde_json::from_str(object.get()).unwrap_or_default(),
            EncodedObject::Protobuf(message) => Self::from_protobuf(message),
        }
    }

    fn from_protobuf(message: Bytes) -> Self {
        let status = protobuf::Status::decode(message).unwrap_or_default();
        Self {
            code: u16::try_from(status.code).unwrap_or_default(),
            message: status.message,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::{Value, json};
    use tulle_core::names::label;

    use super::*;
    use crate::resources::Kind;
    use crate::source::kubernetes::kinds::ObjectDetail;

    fn body(kind: &str, message: &impl Message) -> Bytes {
        let unknown = protobuf::Unknown {
            type_meta: Some(protobuf::TypeMeta { kind: kind.to_owned() }),
            raw: message.encode_to_vec().into(),
        };
        [protobuf::PREFIX, &unknown.encode_to_vec()].concat().into()
    }

    fn status(code: i32) -> protobuf::Status {
        protobuf::Status {
            message: "too old".to_owned(),
            code,
        }
    }

    #[test]
    fn a_response_that_is_not_a_list_is_an_error() {
        let list = protobuf::List {
            metadata: Some(protobuf::ListMeta {
                resource_version: "7".to_owned(),
                r#continue: "next".to_owned(),
            }),
            items: vec![Bytes::new(), Bytes::new()],
        };
        let json = Bytes::from(r#"{"metadata":{"resourceVersion":"7","continue":"next"},"items":[{},{}]}"#);
        for body in [body("PodList", &list), json] {
            let page = ListPage::parse(&body).unwrap();
            assert_eq!((&*page.resource_version, &*page.next_page), ("7", "next"));
            assert_eq!(page.items.len(), 2);
        }
        let others = [
            body("Status", &status(200)),
            Bytes::from(r#"{"kind":"Status","metadata":{"resourceVersion":"7"}}"#),
            Bytes::from("<html>"),
            Bytes::from("k8s\0<html>"),
        ];
        for body in others {
            assert!(ListPage::parse(&body).is_err(), "{body:?}");
        }
    }

    /// The objects of `fuzz/corpus/api_server_response/slices`, which is a list as an API server encodes it. This control plane
    /// manages the second slice, and so keeps all of it.
    fn saved_slices() -> [Value; 3] {
        let metadata = |name: &str, more: Value| {
            let owner = json!({
                "apiVersion": "v1", "kind": "Service", "name": "web", "uid": "0a1b2c3d-0000-4000-8000-000000000002",
                "controller": true, "blockOwnerDeletion": true,
            });
            let mut metadata = json!({
                "name": name, "namespace": "shop", "uid": "0a1b2c3d-0000-4000-8000-000000000001", "resourceVersion": "9",
                "generation": 1, "creationTimestamp": "2025-11-24T16:00:00Z", "ownerReferences": [owner],
            });
            json_patch::merge(&mut metadata, &more);
            metadata
        };
        let labels = |writer: &str| json!({"kubernetes.io/service-name": "web", (label::SLICE_MANAGED_BY): writer});
        let ready = json!({"ready": true, "serving": true, "terminating": false});
        [
            json!({
                "metadata": metadata("web-x7k2p", json!({
                    "labels": labels("endpointslice-controller.k8s.io"),
                    "annotations": {"endpoints.kubernetes.io/last-change-trigger-time": "2025-11-24T16:00:00Z"},
                })),
                "addressType": "IPv4",
                "endpoints": [
                    {
                        "addresses": ["10.1.0.5"], "conditions": ready, "hostname": "web-0", "nodeName": "node-a", "zone": "east",
                        "hints": {"forZones": [{"name": "east"}], "forNodes": [{"name": "node-a"}]},
                        "targetRef": {
                            "kind": "Pod", "namespace": "shop", "name": "web-0", "uid": "0a1b2c3d-0000-4000-8000-000000000003",
                        },
                    },
                    {
                        "addresses": ["10.1.0.6"], "conditions": {"ready": false, "serving": true, "terminating": true},
                        "targetRef": {"kind": "Pod", "namespace": "shop", "name": "web-1"},
                        "nodeName": "node-b", "zone": "we\u{fffd}st",
                    },
                    {"addresses": ["10.1.0.7"], "conditions": {}},
                ],
                "ports": [
                    {"name": "http", "port": 8080, "protocol": "TCP", "appProtocol": "http"},
                    {"name": "dns", "port": 53, "protocol": "UDP"},
                    {"name": "", "protocol": "TCP"},
                ],
            }),
            json!({
                "metadata": metadata("linkerd-external-web-q2w3e", json!({
                    "labels": labels("linkerd-external-workloads-controller"), "finalizers": ["other.example/kept"],
                })),
                "addressType": "IPv6",
                "endpoints": [{
                    "addresses": ["fd00::5"], "conditions": ready,
                    "targetRef": {"kind": "ExternalWorkload", "namespace": "shop", "name": "vm", "fieldPath": "spec"},
                }],
                "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
            }),
            json!({
                "metadata": metadata("names", json!({
                    "deletionTimestamp": "2025-11-24T16:00:01Z", "deletionGracePeriodSeconds": 30,
                })),
                "addressType": "FQDN", "endpoints": [{"addresses": ["web.example.com"], "conditions": {}}], "ports": null,
            }),
        ]
    }

    #[test]
    fn slices_in_protobuf_equal_those_in_json() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/api_server_response/slices");
        let body = Bytes::from(fs::read(path).unwrap());
        let page = ListPage::parse(&body).unwrap();
        let expected = saved_slices();
        assert_eq!(page.items.len(), expected.len());
        for (item, json) in page.items.into_iter().zip(expected) {
            let json = RawValue::from_string(json.to_string()).unwrap();
            let [slice, expected] = [item, EncodedObject::Json(&json)].map(|object| {
                let object = PartlyDecodedObject::parse(object).unwrap();
                object.decode(Kind::EndpointSlice, ObjectDetail::Full).unwrap()
            });
            assert_eq!(slice, expected);
        }
    }

    #[test]
    fn an_error_has_its_code_and_message_in_both_encodings() {
        let json = Bytes::from(r#"{"kind":"Status","message":"too old","code":410}"#);
        for body in [body("Status", &status(410)), json.clone()] {
            let error = StatusError::from_body(&body);
            assert_eq!((error.code, &*error.message), (410, "too old"));
        }
        assert_eq!(StatusError::from_body(&Bytes::from("<html>")).code, 0);

        let event = protobuf::WatchEvent {
            r#type: "ERROR".to_owned(),
            object: Some(protobuf::RawExtension {
                raw: body("Status", &status(410)),
            }),
        };
        let line = [br#"{"type":"ERROR","object":"#.as_slice(), &json, b"}"].concat();
        for (encoding, frame) in [
            (WatchEncoding::Protobuf, event.encode_to_vec()),
            (WatchEncoding::Json, line),
        ] {
            let frame = Bytes::from(frame);
            let event = WatchEvent::parse(&frame, encoding).unwrap();
            assert_eq!(event.r#type, WatchEventType::Error);
            assert_eq!(StatusError::from_object(event.object).code, 410);
        }
    }

    #[test]
    fn a_watch_event_of_an_unknown_type_or_encoding_is_an_error() {
        let event = |name: &str, raw: Bytes| {
            let object = Some(protobuf::RawExtension { raw });
            let event = protobuf::WatchEvent {
                r#type: name.to_owned(),
                object,
            };
            WatchEvent::parse(&event.encode_to_vec().into(), WatchEncoding::Protobuf).map(|event| event.r#type)
        };
        let pod = || body("Pod", &protobuf::ObjectWithHead::default());
        assert_eq!(event("BOOKMARK", pod()).unwrap(), WatchEventType::Bookmark);
        assert!(matches!(event("RENAMED", pod()), Err(DecodeError::EventType(_))));
        assert!(matches!(
            event("ADDED", Bytes::from("{}")),
            Err(DecodeError::NotProtobuf)
        ));
    }
}
