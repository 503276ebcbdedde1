//! The status of a Link. It lists for each exported Service its mirror, or the reason why there is none.

use std::collections::HashMap;

use kube::api::{Api, DynamicObject, Patch, PatchParams};
use serde_json::{Value, json};

use super::plan::inputs::{MirrorStatus, Rejection};
use crate::resources::meta::NamespacedName;

/// The outcome for all exported Services of a Link.
#[derive(Clone, Debug, Default)]
pub(super) struct LinkStatus {
    pub(super) mirrors: Vec<MirrorStatus>,
    pub(super) federated: Vec<MirrorStatus>,
    /// The messages of members of federated Services that lack some of the ports, by the exported Service.
    pub(super) missing_ports: HashMap<NamespacedName, String>,
}

/// Returns the body of the patch that updates the status of a Link, or `None` if the status is up to date. The entries of other
/// controllers stay. The time of a condition changes only if its status changes.
pub(super) fn patch(link: &DynamicObject, status: &LinkStatus, now: &str) -> Option<Value> {
    let lists = [(MIRRORS, &status.mirrors), (FEDERATED, &status.federated)].map(|(field, entries)| {
        let before = status_entries(link, field);
        let ours = entries.iter().map(|entry| {
            let message = status.missing_ports.get(&entry.exported).map(String::as_str);
            json_entry(entry, message.filter(|_| field == FEDERATED), &before, now)
        });
        let others = before.iter().filter(|entry| !is_ours(entry)).cloned();
        (field, ours.chain(others).collect::<Vec<_>>())
    });
    build_patch(link, lists)
}

/// Like [`patch`], but for a cluster whose Services cannot be read: the entries stay, with the cause as their condition.
pub(super) fn unreadable_patch(link: &DynamicObject, cause: &str, now: &str) -> Option<Value> {
    let lists = [MIRRORS, FEDERATED].map(|field| {
        let mut entries = status_entries(link, field);
        for entry in entries.iter_mut().filter(|entry| is_ours(entry)) {
            let since = status_since(Some(entry), "Unknown").unwrap_or(now).to_owned();
            let condition = json!({
                "type": "Mirrored", "status": "Unknown", "reason": "Error", "message": cause, "lastTransitionTime": since,
            });
            entry["conditions"] = json!([condition]);
        }
        (field, entries)
    });
    build_patch(link, lists)
}

/// Sends a patch of the status.
///
/// # Errors
/// Fails if the API server rejects the patch.
pub(super) async fn write(links: &Api<DynamicObject>, name: &str, patch: &Value) -> Result<(), kube::Error> {
    links
        .patch_status(name, &PatchParams::default(), &Patch::Merge(patch))
        .await
        .map(drop)
}

fn build_patch(link: &DynamicObject, lists: [(&str, Vec<Value>); 2]) -> Option<Value> {
    if lists
        .iter()
        .all(|(field, entries)| *entries == status_entries(link, field))
    {
        return None;
    }
    // The lists are sent even if they are empty, because a merge keeps a list that is absent.
    let [(first, entries), (second, more)] = lists;
    // With the resource version, the patch fails if another controller has changed the entries meanwhile.
    let version = &link.metadata.resource_version;
    Some(json!({"metadata": {"resourceVersion": version}, "status": {first: entries, second: more}}))
}

fn status_entries(link: &DynamicObject, field: &str) -> Vec<Value> {
    link.data["status"][field].as_array().cloned().unwrap_or_default()
}

fn is_ours(entry: &Value) -> bool {
    entry["controllerName"] == CONTROLLER_NAME
}

/// `message` is that of an entry with a local Service.
fn json_entry(entry: &MirrorStatus, message: Option<&str>, before: &[Value], now: &str) -> Value {
    let (status, reason, message) = match &entry.mirror {
        Ok(_) => ("True", "Mirrored", message.unwrap_or_default().to_owned()),
        Err(rejection) => ("False", reason(rejection), rejection.to_string()),
    };
    let remote = reference(&entry.exported);
    let previous = before
        .iter()
        .find(|other| is_ours(other) && other["remoteRef"] == remote);
    let mut condition = json!({
        "type": "Mirrored", "status": status, "reason": reason, "message": message,
        "lastTransitionTime": status_since(previous, status).unwrap_or(now),
    });
    if let Ok(mirror) = &entry.mirror {
        condition["localRef"] = reference(mirror);
    }
    json!({"controllerName": CONTROLLER_NAME, "remoteRef": remote, "conditions": [condition]})
}

/// The time since which an entry has had this status. `None` if it has another status.
fn status_since<'a>(entry: Option<&'a Value>, status: &str) -> Option<&'a str> {
    let condition = entry?.get("conditions")?.get(0)?;
    let since = condition["lastTransitionTime"].as_str();
    since.filter(|_| condition["status"] == status)
}

fn reason(rejection: &Rejection) -> &'static str {
    match rejection {
        Rejection::InvalidService(_) => "InvalidService",
        Rejection::MissingNamespace(_) => "MissingNamespace",
        Rejection::Failed(_) => "Error",
    }
}

fn reference(name: &NamespacedName) -> Value {
    json!({"group": "core", "kind": "Service", "name": &*name.name, "namespace": &*name.namespace})
}

const CONTROLLER_NAME: &str = "linkerd.io/service-mirror";
const MIRRORS: &str = "mirrorServices";
const FEDERATED: &str = "federatedServices";

#[cfg(test)]
mod tests {
    use super::*;

    fn link(status: &Value) -> DynamicObject {
        serde_json::from_value(json!({
            "apiVersion": "multicluster.linkerd.io/v1alpha3", "kind": "Link",
            "metadata": {"name": "east"}, "status": status,
        }))
        .unwrap()
    }

    fn web(mirror: Result<(), Rejection>) -> LinkStatus {
        let entry = MirrorStatus {
            exported: NamespacedName::new("shop", "web"),
            mirror: mirror.map(|()| NamespacedName::new("shop", "web-east")),
        };
        LinkStatus {
            mirrors: vec![entry],
            ..LinkStatus::default()
        }
    }

    /// The status after a patch.
    fn applied(patch: Option<Value>) -> Value {
        patch.expect("the status changes")["status"].clone()
    }

    #[test]
    fn the_time_of_a_condition_changes_with_its_status() {
        let first = applied(patch(&link(&Value::Null), &web(Ok(())), "1"));
        let condition = &first[MIRRORS][0]["conditions"][0];
        assert_eq!(
            (&condition["status"], &condition["localRef"]["name"]),
            (&json!("True"), &json!("web-east"))
        );
        assert_eq!(patch(&link(&first), &web(Ok(())), "2"), None);

        let missing = web(Err(Rejection::MissingNamespace("shop".to_owned())));
        let second = applied(patch(&link(&first), &missing, "2"));
        let condition = &second[MIRRORS][0]["conditions"][0];
        let expected = json!({
            "type": "Mirrored", "status": "False", "reason": "MissingNamespace", "lastTransitionTime": "2",
            "message": "namespace shop does not exist here",
        });
        assert_eq!(*condition, expected);
        let failed = web(Err(Rejection::Failed("refused".to_owned())));
        let third = applied(patch(&link(&second), &failed, "3"));
        assert_eq!(third[MIRRORS][0]["conditions"][0]["lastTransitionTime"], "2");
    }

    #[test]
    fn a_member_that_lacks_ports_has_a_message_and_stays_a_member() {
        let web = web(Ok(()));
        let mut joined = LinkStatus {
            federated: web.mirrors.clone(),
            ..web
        };
        let first = applied(patch(&link(&Value::Null), &joined, "1"));
        let name = joined.federated[0].exported.clone();
        joined.missing_ports.insert(name, "81".to_owned());
        let second = applied(patch(&link(&first), &joined, "2"));
        let expected = json!({
            "type": "Mirrored", "status": "True", "reason": "Mirrored", "message": "81", "lastTransitionTime": "1",
            "localRef": {"group": "core", "kind": "Service", "name": "web-east", "namespace": "shop"},
        });
        assert_eq!(second[FEDERATED][0]["conditions"], json!([expected]));
        assert_eq!(second[MIRRORS], first[MIRRORS]);
    }

    #[test]
    fn only_entries_of_this_controller_are_removed() {
        let foreign =
            json!({"controllerName": "other", "remoteRef": {"name": "x", "namespace": "y"}, "conditions": []});
        let mut status = applied(patch(&link(&Value::Null), &web(Ok(())), "1"));
        status[MIRRORS].as_array_mut().unwrap().push(foreign.clone());
        let emptied = applied(patch(&link(&status), &LinkStatus::default(), "2"));
        assert_eq!(emptied, json!({MIRRORS: [foreign], FEDERATED: []}));
    }

    #[test]
    fn the_entries_of_an_unreadable_cluster_have_the_cause() {
        let status = applied(patch(&link(&Value::Null), &web(Ok(())), "1"));
        let unreadable = applied(unreadable_patch(&link(&status), "unreachable", "2"));
        let condition = &unreadable[MIRRORS][0]["conditions"][0];
        assert_eq!(
            (
                &condition["status"],
                &condition["message"],
                &condition["lastTransitionTime"]
            ),
            (&json!("Unknown"), &json!("unreachable"), &json!("2"))
        );
        assert_eq!(condition["localRef"], Value::Null);
        assert_eq!(unreadable_patch(&link(&unreadable), "unreachable", "3"), None);
        let mut without_condition = status;
        without_condition[MIRRORS][0]["conditions"] = json!([]);
        assert!(unreadable_patch(&link(&without_condition), "unreachable", "2").is_some());
        assert!(patch(&link(&without_condition), &web(Ok(())), "2").is_some());
        let restored = applied(patch(&link(&unreadable), &web(Ok(())), "3"));
        assert_eq!(restored[MIRRORS][0]["conditions"][0]["status"], "True");
    }
}
