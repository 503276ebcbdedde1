//! Events on a Link: why it is not mirrored, and which settings are invalid.

use k8s_openapi::api::core::v1::ObjectReference;
use kube::api::DynamicObject;
use kube::{Client, ResourceExt as _};
use tulle_core::metrics::Registry;
use tulle_core::names::multicluster;

use super::link::Link;
use crate::kubernetes::event_recorder::{self, EventNote, EventPublisher, EventRecorder, Reporter, Severity};

/// Records Events on Links, one for each cause.
pub(super) struct LinkEvents(EventRecorder);

/// What an Event on a Link is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinkProblem {
    /// The exported Services cannot be read, so the mirrors do not change.
    Unreadable,
    /// A setting is invalid, and its default is used.
    InvalidSetting,
    /// The credentials for the other cluster expire soon.
    CredentialsExpire,
}

impl LinkEvents {
    /// Creates the recorder, and the task that publishes its Events. `client` is that of the local API server, and `instance` is the
    /// name of this process.
    pub(super) fn new(client: Client, instance: &str, registry: &Registry) -> (Self, EventPublisher) {
        let (recorder, publisher) = event_recorder::new_recorder(client, reporter(instance), registry);
        (Self(recorder), publisher)
    }

    /// The recorder, for Events on other objects of this cluster.
    pub(super) fn recorder(&self) -> EventRecorder {
        self.0.clone()
    }

    /// Records a problem of a Link. The caller records it once, not at each retry.
    pub(super) fn record(&self, link: &DynamicObject, problem: LinkProblem, message: &str) {
        self.0.record_per_message(note(link, problem, message));
    }

    /// Records the invalid settings of a Link.
    pub(super) fn record_warnings(&self, link: &DynamicObject, warnings: &[String]) {
        for warning in warnings {
            self.record(link, LinkProblem::InvalidSetting, warning);
        }
    }
}

/// The reporter of all Events of a service mirror. `instance` is the name of the process.
pub(super) fn reporter(instance: &str) -> Reporter {
    Reporter {
        controller: multicluster::SERVICE_MIRROR.to_owned(),
        instance: instance.to_owned(),
    }
}

fn note(link: &DynamicObject, problem: LinkProblem, message: &str) -> EventNote {
    let resource = Link::resource();
    EventNote {
        regarding: ObjectReference {
            api_version: Some(resource.api_version),
            kind: Some(resource.kind),
            namespace: link.namespace(),
            name: Some(link.name_any()),
            uid: link.uid(),
            ..ObjectReference::default()
        },
        severity: Severity::Warning,
        reason: match problem {
            LinkProblem::Unreadable => "Unreadable",
            LinkProblem::InvalidSetting => "InvalidSetting",
            LinkProblem::CredentialsExpire => "CredentialsExpire",
        },
        action: "Mirror",
        message: message.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http::{Request, Response};
    use http_body_util::BodyExt as _;
    use kube::client::Body;
    use serde_json::{Value, json};
    use tokio::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn the_invalid_settings_of_a_link_become_events_with_their_defaults() {
        let (sent, mut requests) = mpsc::unbounded_channel();
        let service = tower::service_fn(move |req: Request<Body>| {
            let sent = sent.clone();
            async move {
                let path = req.uri().path().to_owned();
                let body = req.into_body().collect().await.unwrap().to_bytes();
                let event: Value = serde_json::from_slice(&body).unwrap();
                sent.send((path, event)).unwrap();
                Ok::<_, Infallible>(Response::new(Body::from(body)))
            }
        });
        let client = Client::new(service, "default");
        let (events, mut publisher) = LinkEvents::new(client, "controller-east-0", &Registry::new());
        let probe = json!({"path": "/ready", "port": "4191", "period": "soon", "failureThreshold": "0"});
        let object: DynamicObject = serde_json::from_value(json!({
            "apiVersion": "multicluster.linkerd.io/v1alpha3", "kind": "Link",
            "metadata": {"name": "east", "namespace": "linkerd-multicluster", "uid": "u"},
            "spec": {
                "targetClusterName": "east", "targetClusterDomain": "east.test", "clusterCredentialsSecret": "cred",
                "probeSpec": probe,
            },
        }))
        .unwrap();
        let _publishing = tokio::spawn(async move { publisher.publish().await });
        events.record_warnings(&object, &Link::parse(&object).unwrap().warnings);
        for text in [
            "period \"soon\" is not a duration; 3s is used",
            "failureThreshold \"0\"",
        ] {
            let (path, event) = requests.recv().await.unwrap();
            assert_eq!(path, "/apis/events.k8s.io/v1/namespaces/linkerd-multicluster/events");
            assert_eq!(
                (&event["reason"], &event["type"]),
                (&json!("InvalidSetting"), &json!("Warning"))
            );
            let regarding = json!({
                "apiVersion": "multicluster.linkerd.io/v1alpha3", "kind": "Link", "name": "east",
                "namespace": "linkerd-multicluster", "uid": "u",
            });
            assert_eq!(event["regarding"], regarding);
            assert!(event["note"].as_str().unwrap().contains(text), "{event}");
        }
    }
}
