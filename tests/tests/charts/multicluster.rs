//! Renderings of the chart of the multicluster extension: high availability, and what Prometheus scrapes.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use tulle_tests::charts::{Helm, chart_path};

use crate::render::objects;

/// The objects of the chart, with controllers for the Links `east` and `south`.
fn render(values: &[&str]) -> Vec<Value> {
    let controllers = ["--set=controllers[0].link.ref.name=east,controllers[1].link.ref.name=south"];
    let args = [&controllers[..], values].concat();
    objects(&Helm::new().unwrap().template("tulle-multicluster", &args).unwrap())
}

/// The objects of a kind, by name.
fn of_kind<'a>(objects: &'a [Value], kind: &str) -> BTreeMap<&'a str, &'a Value> {
    let found = objects.iter().filter(|object| object["kind"] == kind);
    found
        .map(|object| (object["metadata"]["name"].as_str().unwrap(), object))
        .collect()
}

/// Number of replicas of each Deployment, and whether it has a PodDisruptionBudget, after a check of the latter.
fn availability(values: &[&str]) -> BTreeMap<String, (u64, bool)> {
    let objects = render(values);
    let budgets = of_kind(&objects, "PodDisruptionBudget");
    let deployments = of_kind(&objects, "Deployment");
    for (name, budget) in &budgets {
        let deployment = &deployments[name]["spec"];
        let selector = &deployment["selector"];
        let expected = json!({"maxUnavailable": 1, "selector": selector});
        assert_eq!(budget["spec"], expected, "{name}");
        // A budget is for pods on different nodes.
        let affinity = &deployment["template"]["spec"]["affinity"]["podAntiAffinity"];
        let separated = &affinity["requiredDuringSchedulingIgnoredDuringExecution"];
        let expected = json!([{"labelSelector": selector, "topologyKey": "kubernetes.io/hostname"}]);
        assert_eq!(*separated, expected, "{name}");
    }
    let replicas = |deployment: &Value| deployment["spec"]["replicas"].as_u64().unwrap();
    deployments
        .into_iter()
        .map(|(name, deployment)| (name.to_owned(), (replicas(deployment), budgets.contains_key(name))))
        .collect()
}

#[test]
fn a_highly_available_installation_has_several_pods_and_a_disruption_budget_for_each_deployment() {
    let check = |values: &[&str], [east, south, gateway, local, all_links]: [(u64, bool); 5]| {
        let expected = BTreeMap::from([
            ("controller-east".to_owned(), east),
            ("controller-south".to_owned(), south),
            ("linkerd-gateway".to_owned(), gateway),
            ("linkerd-local-service-mirror".to_owned(), local),
            ("linkerd-service-mirror".to_owned(), all_links),
        ]);
        assert_eq!(availability(values), expected, "{values:?}");
    };
    check(&[], [(1, false); 5]);
    let ha = format!("--values={}/values-ha.yaml", chart_path("tulle-multicluster"));
    check(&[&ha], [(2, true), (2, true), (3, true), (2, true), (2, true)]);
    // A controller has its own anti-affinity, and its budget follows it.
    let one = "--set=controllers[0].replicas=1,controllers[0].enablePodAntiAffinity=false";
    check(&[&ha, one], [(1, false), (2, true), (3, true), (2, true), (2, true)]);
    let others = "--set=enablePodAntiAffinity=true";
    check(&[others], [(1, false), (1, false), (1, true), (1, true), (1, false)]);
}

#[test]
fn the_service_mirror_leaves_out_the_links_with_controllers_of_their_own() {
    let args_of = |objects: &[Value]| {
        let pod = &of_kind(objects, "Deployment")["linkerd-service-mirror"]["spec"]["template"]["spec"];
        pod["containers"][0]["args"].as_array().unwrap().clone()
    };
    let args = args_of(&render(&["--set=serviceMirror.enableHeadlessServices=true"]));
    for expected in ["-all-links", "-excluded-links=east,south", "-enable-headless-services"] {
        assert!(args.contains(&json!(expected)), "{expected} is not in {args:?}");
    }
    let by_default = objects(&Helm::new().unwrap().template("tulle-multicluster", &[]).unwrap());
    let args = args_of(&by_default);
    assert!(args.contains(&json!("-all-links")), "{args:?}");
    let text = |arg: &Value| arg.as_str().unwrap().to_owned();
    let is_excluding = |arg: &Value| text(arg).starts_with("-excluded-links");
    assert!(!args.iter().any(is_excluding), "{args:?}");
    // Its pods are not those of the controllers that `tulle multicluster link` creates.
    let selector = &of_kind(&by_default, "Deployment")["linkerd-service-mirror"]["spec"]["selector"]["matchLabels"];
    let labels = json!({"component": "linkerd-service-mirror", "app": "linkerd-service-mirror"});
    assert_eq!(*selector, labels);

    let disabled = render(&["--set=serviceMirror.enabled=false"]);
    let left = disabled.iter().filter(|object| {
        object["metadata"]["name"]
            .as_str()
            .unwrap()
            .starts_with("linkerd-service-mirror")
    });
    let left: Vec<_> = left
        .filter(|object| object["metadata"]["labels"]["component"] == "service-mirror")
        .collect();
    assert!(left.is_empty(), "{left:?}");
    assert!(!of_kind(&disabled, "Role").contains_key("linkerd-service-mirror"));
}

#[test]
fn the_node_selector_and_tolerations_at_the_top_are_those_of_the_local_service_mirror() {
    let objects = render(&["--set=nodeSelector.disk=ssd,tolerations[0].operator=Exists"]);
    for (name, deployment) in of_kind(&objects, "Deployment") {
        let pod = &deployment["spec"]["template"]["spec"];
        let expected = match name {
            "linkerd-local-service-mirror" => [json!({"disk": "ssd"}), json!([{"operator": "Exists"}])],
            _ => [Value::Null, Value::Null],
        };
        assert_eq!(
            [&pod["nodeSelector"], &pod["tolerations"]],
            [&expected[0], &expected[1]],
            "{name}"
        );
    }
}

#[test]
fn the_gateway_serves_exported_services_unless_another_selector_is_set() {
    let annotation = "config.tulle.dev/gateway-exported-services";
    for (values, expected) in [
        (&[][..], json!("mirror.linkerd.io/exported in (true,remote-discovery)")),
        (
            &["--set-string=gateway.exportedServices=team in (a\\,b)"],
            json!("team in (a,b)"),
        ),
        (&["--set-string=gateway.exportedServices="], Value::Null),
    ] {
        let objects = render(values);
        for (name, deployment) in of_kind(&objects, "Deployment") {
            let annotations = &deployment["spec"]["template"]["metadata"]["annotations"];
            let (enabled, selector) = match name {
                "linkerd-gateway" => (json!("true"), &expected),
                _ => (Value::Null, &Value::Null),
            };
            assert_eq!(annotations["config.linkerd.io/enable-gateway"], enabled, "{name}");
            assert_eq!(annotations[annotation], *selector, "{name}, {values:?}");
        }
    }
}

#[test]
fn the_pod_monitor_selects_all_service_mirrors_by_labels_and_ports_that_they_have() {
    let objects = render(&["--set=podMonitor.enabled=true"]);
    let monitors = of_kind(&objects, "PodMonitor");
    assert_eq!(monitors.len(), 1);
    let monitor = monitors["linkerd-multicluster-controller"];
    let spec = &monitor["spec"];
    let endpoints = spec["podMetricsEndpoints"].as_array().unwrap();
    let scraped: Vec<&Value> = endpoints.iter().map(|endpoint| &endpoint["port"]).collect();
    // Without a selector of namespaces, only pods in the namespace of the PodMonitor are selected.
    assert_eq!(spec["namespaceSelector"], Value::Null);
    let mut selected = Vec::new();
    for (name, deployment) in of_kind(&objects, "Deployment") {
        assert_eq!(deployment["metadata"]["namespace"], monitor["metadata"]["namespace"]);
        let template = &deployment["spec"]["template"];
        if !selects(&spec["selector"], &template["metadata"]["labels"]) {
            continue;
        }
        let ports = template["spec"]["containers"][0]["ports"].as_array().unwrap();
        let found = ports.iter().filter(|port| scraped.contains(&&port["name"]));
        assert_eq!(found.count(), 1, "{name}: {ports:?}");
        selected.push(name);
    }
    // The gateway has no metrics but those of its proxy, which the control plane's PodMonitor for proxies selects.
    assert_eq!(
        selected,
        [
            "controller-east",
            "controller-south",
            "linkerd-local-service-mirror",
            "linkerd-service-mirror"
        ]
    );
}

/// Whether a label selector, which has only expressions with the operator `In`, selects these labels.
fn selects(selector: &Value, labels: &Value) -> bool {
    assert_eq!(selector.as_object().unwrap().len(), 1, "{selector}");
    let expressions = selector["matchExpressions"].as_array().unwrap();
    expressions.iter().all(|expression| {
        assert_eq!(expression["operator"], "In", "{selector}");
        let label = &labels[expression["key"].as_str().unwrap()];
        expression["values"].as_array().unwrap().contains(label)
    })
}
