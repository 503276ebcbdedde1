//! `tulle multicluster link`, which is deprecated: prints what `link-gen` prints, and a controller for the Link.

use anyhow::{bail, ensure};
use serde_json::{Value, json};
use tulle_core::names::{label, multicluster};

use super::extension::{LOCAL_ACCESS_OF_CHART, LegacyController, PROBE_SERVICE_PREFIX};
use super::link_gen;
use crate::install::charts::{Helm, MULTICLUSTER};
use crate::install::manifests::format_manifests;
use crate::install::values::{HelmFlags, merge_values, set_value, write_values};
use crate::kubernetes;

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct LinkArgs {
    #[command(flatten)]
    link: link_gen::Args,
    /// Accepted for compatibility; only the value 3 is allowed, and failed steps are repeated until they succeed [default: 3]
    #[arg(long, value_name = "NUMBER")]
    service_mirror_retry_limit: Option<u32>,
    /// The log level of the controller: error, warn, info, debug, trace [default: info]
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<String>,
    /// The log format of the controller: plain, json [default: plain]
    #[arg(long, value_name = "FORMAT")]
    log_format: Option<String>,
    /// The registry of the controller's image, such as registry.example.com/mesh
    #[arg(long, value_name = "REGISTRY")]
    registry: Option<String>,
    /// The tag of the controller's image [default: the version of this command]
    #[arg(long, value_name = "VERSION")]
    control_plane_version: Option<String>,
    /// Run two replicas of the controller, on different nodes
    #[arg(long)]
    ha: bool,
    #[command(flatten)]
    helm: HelmFlags,
}

/// Prints the manifests.
///
/// # Errors
/// Fails if a flag is invalid, if an object of the cluster is missing or incomplete, or if the chart rejects the values.
pub(crate) fn main(args: &LinkArgs, flags: &kubernetes::Flags) -> anyhow::Result<()> {
    let name = &args.link.cluster_name;
    eprintln!(
        "tulle: `tulle multicluster link` is deprecated; use `tulle multicluster link-gen`: the service mirror of the chart \
         tulle-multicluster mirrors all Links. To give a Link a controller of its own, add an entry to the value `controllers`, such \
         as by `tulle multicluster install --set 'controllers[0].link.ref.name={name}'`"
    );
    check_args(args)?;
    let mut manifests = link_gen::link_manifests(&args.link, flags)?;
    manifests.extend(render_controller(args, &flags.linkerd_namespace)?);
    crate::print(&format_manifests(&manifests, args.link.output)?)
}

fn check_args(args: &LinkArgs) -> anyhow::Result<()> {
    if let Some(limit) = args.service_mirror_retry_limit.filter(|limit| *limit != RETRY_LIMIT) {
        bail!(
            "--service-mirror-retry-limit {limit} has no effect, because the controller repeats failed steps until they succeed; \
             remove the flag"
        );
    }
    let name = &args.link.cluster_name;
    ensure!(
        !args.link.gateway || name.len() <= MAX_CLUSTER_NAME_LEN,
        "--cluster-name {name:?} has {} characters; use at most {MAX_CLUSTER_NAME_LEN}, because the name of the Service \
         {PROBE_SERVICE_PREFIX}{name} can have 63, or use `tulle multicluster link-gen`",
        name.len()
    );
    Ok(())
}

/// Renders the controller of the Link with the chart.
fn render_controller(args: &LinkArgs, control_plane_namespace: &str) -> anyhow::Result<Vec<Value>> {
    let link = &args.link.cluster_name;
    let helm = Helm::find(&args.link.namespace)?;
    let control_plane = json!({"linkerdNamespace": control_plane_namespace});
    let mut files = vec![write_values(&helm, "values-of-control-plane.yaml", &control_plane)?];
    files.extend(args.ha.then(|| helm.high_availability_values(&MULTICLUSTER)));
    let mut values = merge_values(&helm, files, &args.helm, &args.values())?;
    add_controller(&mut values, link)?;
    Ok(controller_objects(helm.render(&MULTICLUSTER, &values)?, link))
}

impl LinkArgs {
    /// The values that the flags set.
    fn values(&self) -> Value {
        let mut values = json!({});
        set_value(
            &mut values,
            "controllerDefaults.gateway.enabled",
            json!(self.link.gateway),
        );
        let registry = self.registry.as_ref();
        let image = registry.map(|registry| format!("{}/controller", registry.trim_end_matches('/')));
        for (key, value) in [
            ("controllerDefaults.logLevel", &self.log_level),
            ("controllerDefaults.logFormat", &self.log_format),
            ("controllerDefaults.image.name", &image),
            ("controllerDefaults.image.version", &self.control_plane_version),
        ] {
            if let Some(value) = value {
                set_value(&mut values, key, json!(value));
            }
        }
        values
    }
}

/// Adds the controller of the Link to the values. Refuses values with other controllers, which would not be printed.
fn add_controller(values: &mut Value, link: &str) -> anyhow::Result<()> {
    let given = &values["controllers"];
    ensure!(
        given.is_null() || *given == json!([]),
        "the values have `controllers`, but `link` prints the controller of the Link {link} only; remove them, and set the values \
         of this controller by `controllerDefaults`"
    );
    values["controllers"] = json!([{"link": {"ref": {"name": link}}}]);
    Ok(())
}

/// Selects the objects of the Link's controller from those of the chart, and gives them the names and labels of Linkerd's `link`.
fn controller_objects(mut rendered: Vec<Value>, link: &str) -> Vec<Value> {
    rendered.retain(|object| {
        let metadata = &object["metadata"];
        metadata["labels"][label::MIRRORED_CLUSTER] == link
            // All controllers of the chart share this role.
            || object["kind"] == "ClusterRole" && metadata["name"] == LOCAL_ACCESS_OF_CHART
    });
    for object in &mut rendered {
        rename(object, link);
        object["metadata"]["labels"][label::MIRRORED_CLUSTER] = json!(link);
    }
    rendered
}

fn rename(object: &mut Value, link: &str) {
    let legacy = LegacyController::new(link);
    let names = [
        (LOCAL_ACCESS_OF_CHART.to_owned(), &legacy.local_access),
        (format!("{LOCAL_ACCESS_OF_CHART}-{link}"), &legacy.local_access),
        (format!("controller-{link}"), &legacy.service_mirror),
        (format!("controller-read-remote-creds-{link}"), &legacy.credentials),
        (format!("remote-discovery-{link}"), &legacy.destination_credentials),
        (multicluster::probe_service_of_chart(link), &legacy.probe_service),
    ];
    for pointer in NAME_POINTERS {
        let Some(name) = object.pointer_mut(pointer) else {
            continue;
        };
        if let Some((_, legacy_name)) = names.iter().find(|(chart_name, _)| *name == *chart_name) {
            *name = json!(legacy_name);
        }
    }
    for (pointer, chart_text, legacy_text) in LEGACY_TEXTS {
        if let Some(text) = object.pointer_mut(pointer)
            && *text == chart_text
        {
            *text = json!(legacy_text);
        }
    }
    let probe_service = multicluster::probe_service_of_chart(link);
    let args = object.pointer_mut("/spec/template/spec/containers/0/args");
    for arg in args.and_then(Value::as_array_mut).into_iter().flatten() {
        if *arg == format!("-probe-service={probe_service}") {
            *arg = json!(format!("-probe-service={}", legacy.probe_service));
        }
    }
}

/// The only limit that the chart accepts.
const RETRY_LIMIT: u32 = 3;
const MAX_CLUSTER_NAME_LEN: usize = 63 - PROBE_SERVICE_PREFIX.len();

/// JSON pointers to the fields that can contain the name of an object of the controller.
const NAME_POINTERS: [&str; 4] = [
    "/metadata/name",
    "/roleRef/name",
    "/subjects/0/name",
    "/spec/template/spec/serviceAccountName",
];

/// JSON pointers to the fields that contain the component, the container or the port of the controller, each with the text of the
/// chart and the text of Linkerd's `link`. Linkerd gives pods another component than other objects.
const LEGACY_TEXTS: [(&str, &str, &str); 8] = [
    ("/metadata/labels/component", "controller", "service-mirror"),
    (
        "/metadata/labels/app.kubernetes.io~1name",
        "controller",
        "service-mirror",
    ),
    ("/spec/selector/matchLabels/component", "controller", COMPONENT_OF_PODS),
    (
        "/spec/template/metadata/labels/component",
        "controller",
        COMPONENT_OF_PODS,
    ),
    (
        "/spec/template/spec/affinity/podAntiAffinity/requiredDuringSchedulingIgnoredDuringExecution/0/labelSelector/matchLabels\
         /component",
        "controller",
        COMPONENT_OF_PODS,
    ),
    (
        "/spec/template/spec/affinity/podAntiAffinity/preferredDuringSchedulingIgnoredDuringExecution/0/podAffinityTerm\
         /labelSelector/matchLabels/component",
        "controller",
        COMPONENT_OF_PODS,
    ),
    ("/spec/template/spec/containers/0/name", "controller", "service-mirror"),
    (
        "/spec/template/spec/containers/0/ports/0/name",
        "ctrl-admin",
        "svcmi-admin",
    ),
];
const COMPONENT_OF_PODS: &str = "linkerd-service-mirror";

pub(super) const EXAMPLES: &str = "\
Deprecated, and kept for scripts that use the command of Linkerd with this name. Use instead:

  tulle multicluster link-gen --context east --cluster-name east | kubectl --context west apply -f -

The service mirror that `tulle multicluster install` prints mirrors all Links.

Values of the chart tulle-multicluster (--set, --values) apply to the controller: those of controllerDefaults, and those of all pods \
and objects. To let the service mirror for all Links replace a controller that this command has created, remove the controller:

  tulle multicluster unlink --context west --cluster-name east --only-controller | kubectl --context west delete -f -";

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::super::unlink;
    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: LinkArgs,
    }

    fn args(line: &str) -> LinkArgs {
        let words = ["link", "--cluster-name=east"].into_iter();
        Line::parse_from(words.chain(line.split_whitespace())).args
    }

    #[test]
    fn flags_set_values_of_the_controller() {
        assert_eq!(
            args("").values(),
            json!({"controllerDefaults": {"gateway": {"enabled": true}}})
        );
        let all = "--gateway=false --log-level=debug --log-format=json --registry=r.example/mesh/ --control-plane-version=1.10";
        assert_eq!(
            args(all).values(),
            json!({"controllerDefaults": {
                "gateway": {"enabled": false}, "logLevel": "debug", "logFormat": "json",
                "image": {"name": "r.example/mesh/controller", "version": "1.10"},
            }})
        );
    }

    #[test]
    fn the_values_have_the_controller_of_the_link_only() {
        let mut values = json!({"linkerdNamespace": "linkerd", "controllers": []});
        add_controller(&mut values, "east").unwrap();
        assert_eq!(values["controllers"], json!([{"link": {"ref": {"name": "east"}}}]));
        let error = add_controller(&mut values, "north").unwrap_err().to_string();
        assert!(error.contains("controllerDefaults"), "{error}");
        assert!(add_controller(&mut json!({"controllers": "east"}), "east").is_err());
    }

    #[test]
    fn flags_without_effect_and_long_names_are_refused() {
        let name = "e".repeat(MAX_CLUSTER_NAME_LEN + 1);
        let with_name = |line: &str| {
            let mut args = args(line);
            args.link.cluster_name.clone_from(&name);
            args
        };
        check_args(&args("--service-mirror-retry-limit=3")).unwrap();
        check_args(&with_name("--gateway=false")).unwrap();
        for (args, expected) in [
            (args("--service-mirror-retry-limit=4"), "--service-mirror-retry-limit 4"),
            (with_name(""), "has 50 characters; use at most 49"),
        ] {
            let error = check_args(&args).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    /// An object as the chart renders it for the controller of the Link `east`.
    fn chart_object(kind: &str, namespace: Option<&str>, name: &str, more: &Value) -> Value {
        let labels = json!({"component": "controller", "mirror.linkerd.io/cluster-name": "east"});
        let mut object = json!({"kind": kind, "metadata": {"name": name, "labels": labels}});
        if let Some(namespace) = namespace {
            object["metadata"]["namespace"] = json!(namespace);
        }
        for (field, value) in more.as_object().unwrap() {
            object[field] = value.clone();
        }
        object
    }

    fn chart_deployment() -> Value {
        let labels = json!({"component": "controller", "mirror.linkerd.io/cluster-name": "east"});
        let required = json!({"labelSelector": {"matchLabels": labels}});
        let preferred = json!({"weight": 100, "podAffinityTerm": {"labelSelector": {"matchLabels": labels}}});
        let container = json!({
            "name": "controller", "ports": [{"name": "ctrl-admin", "containerPort": 9999}],
            "args": ["service-mirror", "-link-name=east", "-probe-service=probe-east"],
        });
        let spec = json!({
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {
                "serviceAccountName": "controller-east", "containers": [container],
                "nodeSelector": {"kubernetes.io/hostname": "controller-east"},
                "affinity": {"podAntiAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": [required],
                    "preferredDuringSchedulingIgnoredDuringExecution": [preferred],
                }},
            }},
        });
        let extension = Some("linkerd-multicluster");
        let mut deployment = chart_object("Deployment", extension, "controller-east", &json!({"spec": spec}));
        deployment["metadata"]["labels"]["app.kubernetes.io/name"] = json!("controller");
        deployment
    }

    /// The objects of the chart for the Link `east`, and one of the gateway.
    fn chart_objects() -> Vec<Value> {
        let (extension, control_plane) = (Some("linkerd-multicluster"), Some("linkerd"));
        let (access, credentials) = (LOCAL_ACCESS_OF_CHART, "controller-read-remote-creds-east");
        let binding = |role: &str, account: &str| json!({"roleRef": {"name": role}, "subjects": [{"name": account}]});
        let (of_controller, of_destination) = ("controller-east", "linkerd-destination");
        let selector = json!({"spec": {"selector": {"matchLabels": {"component": "controller"}}}});
        let discovery = "remote-discovery-east";
        vec![
            json!({"kind": "Deployment", "metadata": {"name": "linkerd-gateway", "labels": {"component": "gateway"}}}),
            chart_object("ServiceAccount", extension, of_controller, &json!({})),
            chart_object("PodDisruptionBudget", extension, of_controller, &selector),
            chart_object("Service", extension, "probe-east", &json!({})),
            // All controllers share this role.
            json!({"kind": "ClusterRole", "metadata": {"name": access, "labels": {"component": "controller"}}}),
            chart_object(
                "ClusterRoleBinding",
                None,
                &format!("{access}-east"),
                &binding(access, of_controller),
            ),
            chart_object("Role", extension, credentials, &json!({})),
            chart_object(
                "RoleBinding",
                extension,
                credentials,
                &binding(credentials, of_controller),
            ),
            chart_object("Role", control_plane, discovery, &json!({})),
            chart_object(
                "RoleBinding",
                control_plane,
                discovery,
                &binding(discovery, of_destination),
            ),
            chart_deployment(),
        ]
    }

    #[test]
    fn a_controller_consists_of_the_objects_that_unlink_prints() {
        let key = |object: &Value| {
            let text = |value: &Value| value.as_str().map(str::to_owned);
            let metadata = &object["metadata"];
            (
                text(&object["kind"]).unwrap(),
                text(&metadata["namespace"]),
                text(&metadata["name"]).unwrap(),
            )
        };
        let mut printed: Vec<_> = controller_objects(chart_objects(), "east").iter().map(key).collect();
        let unlinked = unlink::legacy_controller("east", "linkerd-multicluster", "linkerd").into_iter();
        let mut unlinked: Vec<_> = unlinked
            .map(|(_, kind, namespace, name)| (kind.to_owned(), namespace.map(str::to_owned), name))
            .collect();
        printed.sort();
        unlinked.sort();
        assert_eq!(printed, unlinked);
    }

    #[test]
    fn a_controller_has_the_names_and_labels_of_linkerds_link() {
        let objects = controller_objects(chart_objects(), "east");
        for object in &objects {
            let labels = &object["metadata"]["labels"];
            assert_eq!(labels["component"], "service-mirror", "{object}");
            assert_eq!(labels["mirror.linkerd.io/cluster-name"], "east", "{object}");
        }
        let find = |kind: &str, name: &str| {
            let is_wanted = |object: &&Value| object["kind"] == kind && object["metadata"]["name"] == name;
            let found = objects.iter().find(is_wanted);
            found.unwrap_or_else(|| panic!("there is no {kind} {name}"))
        };
        let account = "linkerd-service-mirror-east";
        for (kind, role, subject) in [
            (
                "ClusterRole",
                "linkerd-service-mirror-access-local-resources-east",
                account,
            ),
            ("Role", "linkerd-service-mirror-read-remote-creds-east", account),
            (
                "Role",
                "linkerd-service-mirror-remote-discovery-east",
                "linkerd-destination",
            ),
        ] {
            find(kind, role);
            let binding = find(&format!("{kind}Binding"), role);
            assert_eq!(binding["roleRef"]["name"], role);
            assert_eq!(binding["subjects"][0]["name"], subject);
        }
        let budget = find("PodDisruptionBudget", account);
        assert_eq!(
            budget["spec"]["selector"]["matchLabels"]["component"],
            COMPONENT_OF_PODS
        );
    }

    #[test]
    fn the_pods_of_a_controller_have_the_names_and_labels_of_linkerds_link() {
        let objects = controller_objects(vec![chart_deployment()], "east");
        let [deployment] = &objects[..] else {
            panic!("one object, not {objects:?}")
        };
        let labels = json!({"component": COMPONENT_OF_PODS, "mirror.linkerd.io/cluster-name": "east"});
        assert_eq!(
            deployment["metadata"]["labels"]["app.kubernetes.io/name"],
            "service-mirror"
        );
        assert_eq!(deployment["spec"]["selector"]["matchLabels"], labels);
        assert_eq!(deployment["spec"]["template"]["metadata"]["labels"], labels);
        let pod = &deployment["spec"]["template"]["spec"];
        let affinity = &pod["affinity"]["podAntiAffinity"];
        let required = &affinity["requiredDuringSchedulingIgnoredDuringExecution"][0];
        let preferred = &affinity["preferredDuringSchedulingIgnoredDuringExecution"][0]["podAffinityTerm"];
        for term in [required, preferred] {
            assert_eq!(term["labelSelector"]["matchLabels"], labels);
        }
        assert_eq!(pod["serviceAccountName"], "linkerd-service-mirror-east");
        let container = &pod["containers"][0];
        assert_eq!(container["name"], "service-mirror");
        assert_eq!(container["ports"][0]["name"], "svcmi-admin");
        let args = json!(["service-mirror", "-link-name=east", "-probe-service=probe-gateway-east"]);
        assert_eq!(container["args"], args);
        // A field that does not name an object of the controller stays unchanged.
        assert_eq!(pod["nodeSelector"]["kubernetes.io/hostname"], "controller-east");
    }
}
