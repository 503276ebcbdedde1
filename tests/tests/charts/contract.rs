//! Compares the rendered fields on which users and tools of Linkerd rely with `contract.yaml`.

use std::collections::BTreeMap;

use aws_lc_rs::digest::{SHA256, digest};
use serde_json::{Map, Value};
use tulle_tests::charts::Helm;

use crate::render::{installations, objects};

type Objects = BTreeMap<String, Value>;

/// The objects of an installation, by kind and name.
fn rendered(installation: &str) -> Objects {
    let values: BTreeMap<_, _> = installations().into_iter().collect();
    let values: Vec<&str> = values[installation].iter().map(String::as_str).collect();
    let text = Helm::new().unwrap().template("tulle-control-plane", &values).unwrap();
    index_by_name(objects(&text))
}

fn index_by_name(objects: Vec<Value>) -> Objects {
    let name = |object: &Value| {
        let part = |pointer: &str| {
            object
                .pointer(pointer)
                .and_then(Value::as_str)
                .unwrap_or_default()
                .to_owned()
        };
        format!("{} {}", part("/kind"), part("/metadata/name"))
    };
    objects.into_iter().map(|object| (name(&object), object)).collect()
}

#[test]
fn rendered_objects_match_the_contract() {
    let contract = include_str!("contract.yaml").replace("VERSION", env!("CARGO_PKG_VERSION"));
    let contract: BTreeMap<String, Vec<Value>> = serde_yaml_ng::from_str(&contract).unwrap();
    let contract: BTreeMap<_, _> = contract
        .into_iter()
        .map(|(installation, objects)| (installation, index_by_name(objects)))
        .collect();
    let mut differences = Vec::new();
    for (installation, expected) in &contract {
        let rendered = rendered(installation);
        for (name, expected) in expected {
            let actual = rendered.get(name).unwrap_or(&Value::Null);
            compare(&format!("{installation}: {name}"), expected, actual, &mut differences);
        }
        let unexpected = rendered
            .keys()
            .filter(|name| !expected.contains_key(*name) && !contract["default"].contains_key(*name));
        differences.extend(unexpected.map(|name| format!("{installation}: {name} is not in contract.yaml")));
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

/// Adds the differences of `actual` from `expected`. A map may have more keys than expected, and a key that is expected to be
/// null may be absent. If all expected elements of a list have names, elements with the same name are compared, and the order does
/// not matter. Other lists have to be equal.
fn compare(path: &str, expected: &Value, actual: &Value, differences: &mut Vec<String>) {
    match (expected, actual) {
        (Value::Object(expected), Value::Object(actual)) => {
            for (key, value) in expected {
                let actual = actual.get(key).unwrap_or(&Value::Null);
                compare(&format!("{path}.{key}"), value, actual, differences);
            }
        }
        (Value::Array(expected), Value::Array(actual))
            if !expected.is_empty() && expected.iter().all(|element| element_name(element).is_some()) =>
        {
            if actual.len() != expected.len() {
                let (actual, expected) = (join_element_names(actual), join_element_names(expected));
                differences.push(format!("{path} has the elements {actual}, expected {expected}"));
            }
            for element in expected {
                let name = element_name(element);
                let found = actual.iter().find(|actual| element_name(actual) == name);
                let path = format!("{path}[{}]", name.unwrap_or_default());
                compare(&path, element, found.unwrap_or(&Value::Null), differences);
            }
        }
        _ if expected != actual => differences.push(format!("{path} is {actual}, expected {expected}")),
        _ => {}
    }
}

fn element_name(element: &Value) -> Option<&str> {
    element.get("name")?.as_str()
}

fn join_element_names(list: &[Value]) -> String {
    let names: Vec<&str> = list
        .iter()
        .map(|element| element_name(element).unwrap_or("(no name)"))
        .collect();
    names.join(", ")
}

/// Pods of the injector are replaced when its configuration changes.
#[test]
fn the_pods_of_the_injector_have_the_checksum_of_the_recorded_values() {
    let checksum = |installation: &str| {
        let objects = rendered(installation);
        let values = objects["ConfigMap linkerd-config"]["data"]["values"].as_str().unwrap();
        let pod = &objects["Deployment linkerd-proxy-injector"]["spec"]["template"];
        let checksum = pod["metadata"]["annotations"]["checksum/config"].as_str().unwrap();
        let sha256 = digest(&SHA256, values.as_bytes());
        let sha256: String = sha256.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(checksum, sha256, "{installation}");
        checksum.to_owned()
    };
    assert_ne!(checksum("default"), checksum("everything optional"));
}

#[test]
fn every_object_has_the_labels_and_annotations_of_its_installation() {
    for (installation, common) in [("default", &[][..]), ("everything optional", &[("c", "d"), ("e", "f")])] {
        for (name, object) in rendered(installation) {
            let metadata = |field: &str| object["metadata"][field].as_object().cloned().unwrap_or_else(Map::new);
            let (labels, annotations) = (metadata("labels"), metadata("annotations"));
            assert_eq!(
                labels["linkerd.io/control-plane-ns"], "linkerd",
                "{installation}: {name}"
            );
            let created_by = format!("tulle/helm {}", env!("CARGO_PKG_VERSION"));
            assert_eq!(
                annotations["linkerd.io/created-by"], created_by,
                "{installation}: {name}"
            );
            for (label, value) in common {
                assert_eq!(labels[*label], *value, "{installation}: {name}");
            }
        }
    }
}

#[test]
fn a_difference_is_reported_with_its_path_and_both_values() {
    let object = |text: &str| serde_yaml_ng::from_str::<Value>(text).unwrap();
    let expected = object("{a: {b: 1}, ports: [{name: x, port: 1}], list: [1, 2], empty: [], absent: null}");
    let differences = |actual: &str| {
        let mut differences = Vec::new();
        compare("it", &expected, &object(actual), &mut differences);
        differences
    };
    let more = "{a: {b: 1, c: 2}, ports: [{name: x, port: 1, protocol: TCP}], list: [1, 2], empty: [], d: 3}";
    assert!(differences(more).is_empty(), "{:?}", differences(more));
    assert_eq!(
        differences("{a: {b: 2}, ports: [{name: x, port: 2}], list: [1], empty: [1], absent: 1}"),
        [
            "it.a.b is 2, expected 1",
            "it.absent is 1, expected null",
            "it.empty is [1], expected []",
            "it.list is [1], expected [1,2]",
            "it.ports[x].port is 2, expected 1"
        ]
    );
    assert_eq!(
        differences("{a: {b: 1}, ports: [{name: y}, {name: x, port: 1}], list: [1, 2], empty: []}"),
        ["it.ports has the elements y, x, expected x"]
    );
    assert_eq!(
        differences("{a: {b: 1}, ports: [{name: y, port: 1}], list: [1, 2], empty: []}"),
        [r#"it.ports[x] is null, expected {"name":"x","port":1}"#]
    );
}
