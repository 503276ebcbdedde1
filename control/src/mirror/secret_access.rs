//! Whether this process can read the Secret with the credentials of a Link.

use std::convert::Infallible;

use kube::api::DynamicObject;
use kube::runtime::reflector::Store;
use kube::{Client, ResourceExt as _};
use tokio::sync::watch;

use super::link::Link;
use crate::kubernetes::watches::{SecretState, SecretWatch};

/// Whether the Secret of a Link can be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SecretAccess {
    /// Not known yet.
    Unknown,
    /// The Secret can be read, or does not exist, or the Link is invalid. A leader reports the last two.
    Readable,
    /// The Secret cannot be read, for this reason.
    Unreadable(String),
}

/// Finds out whether the Secret of one Link can be read, as long as the Link exists.
pub(super) struct SecretAccessWatch {
    client: Client,
    namespace: String,
    link: String,
    /// The Links of the namespace.
    links: Store<DynamicObject>,
    /// Incremented after each change of `links`.
    link_changes: watch::Receiver<u64>,
    access: watch::Sender<SecretAccess>,
}

impl SecretAccessWatch {
    pub(super) fn new(
        client: Client,
        (namespace, link): (&str, &str),
        links: Store<DynamicObject>,
        link_changes: watch::Receiver<u64>,
    ) -> (Self, watch::Receiver<SecretAccess>) {
        let (access, receiver) = watch::channel(SecretAccess::Unknown);
        let watch = Self {
            client,
            namespace: namespace.to_owned(),
            link: link.to_owned(),
            links,
            link_changes,
            access,
        };
        (watch, receiver)
    }

    pub(super) async fn run(self) -> Infallible {
        let mut link_changes = self.link_changes.clone();
        loop {
            let secret = self.secret_name();
            tokio::select! {
                () = self.wait_for_other_secret(&secret, &mut link_changes) => {}
                never = self.watch_secret(secret.as_deref()) => match never {},
            }
        }
    }

    /// The name of the Secret. `None` if the Link is invalid or deleted.
    fn secret_name(&self) -> Option<String> {
        let links = self.links.state();
        let link = links.iter().find(|link| link.name_any() == self.link)?;
        Link::parse(link).ok().map(|link| link.credentials_secret)
    }

    /// Waits until the Link names another Secret.
    async fn wait_for_other_secret(&self, secret: &Option<String>, link_changes: &mut watch::Receiver<u64>) {
        while self.secret_name() == *secret {
            if link_changes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    async fn watch_secret(&self, secret: Option<&str>) -> Infallible {
        let Some(secret) = secret else {
            self.set(SecretAccess::Readable);
            return std::future::pending().await;
        };
        let mut watch = SecretWatch::new(self.client.clone(), &self.namespace, secret);
        loop {
            let (state, forbidden_cause) = (watch.state(), watch.forbidden_cause());
            let namespace = &self.namespace;
            match (state, forbidden_cause) {
                (_, Some(cause)) => self.set(SecretAccess::Unreadable(format!(
                    "the service mirror for all Links may not read the Secret {namespace}/{secret}; apply the output of `tulle \
                     multicluster link-gen` for this Link again: {cause}"
                ))),
                (SecretState::Unreadable(cause), None) => self.set(SecretAccess::Unreadable(format!(
                    "the Secret {namespace}/{secret} cannot be read: {cause}"
                ))),
                (SecretState::Present(_) | SecretState::Absent, None) => self.set(SecretAccess::Readable),
                (SecretState::Unknown, None) => {}
            }
            watch.changed().await;
        }
    }

    fn set(&self, access: SecretAccess) {
        self.access.send_if_modified(|known| {
            let is_changed = *known != access;
            *known = access;
            is_changed
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use http::{Request, Response};
    use kube::client::Body;
    use kube::runtime::reflector::store::Writer;
    use kube::runtime::watcher::Event;
    use serde_json::json;

    use super::*;

    /// A client of an API server without Secrets, which refuses to list them while `may_read` is false.
    fn client(may_read: &Arc<AtomicBool>) -> Client {
        let may_read = may_read.clone();
        let service = tower::service_fn(move |req: Request<Body>| {
            let may_read = may_read.load(Ordering::Relaxed);
            async move {
                let is_watch = req.uri().query().is_some_and(|query| query.contains("watch=true"));
                if may_read && is_watch {
                    return std::future::pending::<Result<Response<Body>, Infallible>>().await;
                }
                let (code, body) = match may_read {
                    true => (
                        200,
                        json!({"apiVersion": "v1", "kind": "SecretList", "metadata": {"resourceVersion": "1"}, "items": []}),
                    ),
                    false => (
                        403,
                        json!({"apiVersion": "v1", "kind": "Status", "code": 403, "reason": "Forbidden", "message": "no"}),
                    ),
                };
                let body = Body::from(body.to_string().into_bytes());
                Ok(Response::builder().status(code).body(body).unwrap())
            }
        });
        Client::new(service, "default")
    }

    fn links() -> Store<DynamicObject> {
        let link = json!({
            "apiVersion": "multicluster.linkerd.io/v1alpha3", "kind": "Link",
            "metadata": {"name": "to-east", "namespace": "mesh"},
            "spec": {"targetClusterName": "east", "targetClusterDomain": "test", "clusterCredentialsSecret": "cred"},
        });
        let mut writer = Writer::<DynamicObject>::new(Link::resource());
        writer.apply_watcher_event(&Event::Init);
        writer.apply_watcher_event(&Event::InitApply(serde_json::from_value(link).unwrap()));
        writer.apply_watcher_event(&Event::InitDone);
        writer.as_reader()
    }

    #[tokio::test(start_paused = true)]
    async fn a_permission_that_is_given_or_taken_away_changes_the_access() {
        let may_read = Arc::new(AtomicBool::new(false));
        let (_link_changes, receiver) = watch::channel(0);
        let (watch, mut access) = SecretAccessWatch::new(client(&may_read), ("mesh", "to-east"), links(), receiver);
        assert_eq!(*access.borrow(), SecretAccess::Unknown);
        let _running = tokio::spawn(watch.run());
        for is_readable in [false, true, false] {
            may_read.store(is_readable, Ordering::Relaxed);
            let is_expected = |access: &SecretAccess| match access {
                SecretAccess::Unknown => false,
                SecretAccess::Readable => is_readable,
                SecretAccess::Unreadable(_) => !is_readable,
            };
            let found = access.wait_for(is_expected).await.unwrap().clone();
            if let SecretAccess::Unreadable(cause) = found {
                assert!(cause.contains("may not read the Secret mesh/cred"), "{cause}");
            }
        }
    }
}
