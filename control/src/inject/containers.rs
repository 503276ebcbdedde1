//! The containers that injection adds, and their volumes.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Capabilities, Container, ContainerPort, DownwardAPIVolumeFile, DownwardAPIVolumeSource, EmptyDirVolumeSource,
    EnvVar, ExecAction, HTTPGetAction, Lifecycle, LifecycleHandler, ObjectFieldSelector, Probe, ProjectedVolumeSource,
    ResourceRequirements, SeccompProfile, SecurityContext, ServiceAccountTokenProjection, Volume, VolumeMount,
    VolumeProjection,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use tulle_core::names::TOKEN_AUDIENCE;

use crate::inject::env::{END_ENTITY_DIR, PODINFO_DIR, SERVICE_ACCOUNT_DIR, TOKEN_DIR, TOKEN_NAME};
use crate::inject::values::{Constraints, DEBUG_IMAGE, DEBUG_VERSION, Image, InboundMode, IptablesMode, Values};
use crate::inject::{DEBUG_CONTAINER, INIT_CONTAINER, PROXY_CONTAINER, Subject, VALIDATOR_CONTAINER};

/// The sidecar.
pub(super) fn proxy(values: &Values, subject: &Subject<'_>, env: Vec<EnvVar>) -> Container {
    let (proxy, ports) = (&values.proxy, &values.proxy.ports);
    let port = |name: &str, port: u16| ContainerPort {
        name: Some(name.to_owned()),
        container_port: port.into(),
        ..ContainerPort::default()
    };
    let http = |path: &str| HTTPGetAction {
        path: Some(path.to_owned()),
        port: IntOrString::Int(ports.admin.into()),
        ..HTTPGetAction::default()
    };
    let probe = |path: &str, values: &super::values::Probe, delay: i32| Probe {
        http_get: Some(http(path)),
        initial_delay_seconds: Some(values.initial_delay_seconds.unwrap_or(delay)),
        timeout_seconds: Some(values.timeout_seconds),
        ..Probe::default()
    };
    // The kubelet starts what follows a native sidecar once this probe has succeeded.
    let startup = (proxy.native_sidecar && proxy.awaits).then(|| Probe {
        http_get: Some(http("/ready")),
        initial_delay_seconds: Some(proxy.startup_probe.initial_delay_seconds),
        period_seconds: Some(proxy.startup_probe.period_seconds),
        failure_threshold: Some(proxy.startup_probe.failure_threshold),
        ..Probe::default()
    });
    let mut mounts = vec![mount(END_ENTITY_VOLUME, END_ENTITY_DIR)];
    if values.identity.service_account_token_projection {
        mounts.push(mount(TOKEN_VOLUME, TOKEN_DIR));
    }
    if proxy.tracing.enabled {
        mounts.push(mount(PODINFO_VOLUME, PODINFO_DIR));
    }
    mounts.extend(service_account_mount(subject).cloned());
    Container {
        name: PROXY_CONTAINER.to_owned(),
        image: Some(image(values, &proxy.image)),
        image_pull_policy: Some(pull_policy(values, &proxy.image)),
        env: Some(env),
        ports: Some(vec![
            port("linkerd-proxy", ports.inbound),
            port("linkerd-admin", ports.admin),
        ]),
        liveness_probe: Some(probe("/live", &proxy.liveness_probe, 10)),
        readiness_probe: Some(probe("/ready", &proxy.readiness_probe, 0)),
        startup_probe: startup,
        restart_policy: proxy.native_sidecar.then(|| "Always".to_owned()),
        lifecycle: lifecycle(values),
        resources: resources(values),
        security_context: Some(proxy_security(values)),
        termination_message_policy: Some(TERMINATION_POLICY.to_owned()),
        volume_mounts: Some(mounts),
        ..Container::default()
    }
}

/// Hooks: the application of a classic sidecar waits for the proxy; the proxy may wait before it ends.
fn lifecycle(values: &Values) -> Option<Lifecycle> {
    let proxy = &values.proxy;
    let exec = |command: Vec<String>| LifecycleHandler {
        exec: Some(ExecAction { command: Some(command) }),
        ..LifecycleHandler::default()
    };
    let post_start = (!proxy.native_sidecar && proxy.awaits).then(|| {
        exec(vec![
            "/usr/lib/linkerd/linkerd-await".to_owned(),
            "--timeout=2m".to_owned(),
            format!("--port={}", proxy.ports.admin),
        ])
    });
    let n_seconds = proxy.wait_before_exit_seconds;
    let pre_stop = (n_seconds > 0).then(|| exec(vec!["/bin/sleep".to_owned(), n_seconds.to_string()]));
    (post_start.is_some() || pre_stop.is_some()).then(|| Lifecycle {
        post_start,
        pre_stop,
        ..Lifecycle::default()
    })
}

fn proxy_security(values: &Values) -> SecurityContext {
    let proxy = &values.proxy;
    if let Some(security) = &proxy.security_context {
        return security.clone();
    }
    let mut capabilities = proxy.capabilities.clone().unwrap_or_else(drop_all);
    if proxy.inbound_mode == InboundMode::Tproxy {
        let added = capabilities.add.get_or_insert_default();
        if !added.iter().any(|name| name == NET_RAW) {
            added.push(NET_RAW.to_owned());
        }
    }
    SecurityContext {
        run_as_user: Some(proxy.uid),
        run_as_group: (proxy.gid >= 0).then_some(proxy.gid),
        ..confined(capabilities)
    }
}

/// The container that redirects the pod's traffic.
pub(super) fn init(values: &Values, subject: &Subject<'_>) -> Container {
    let init = &values.proxy_init;
    Container {
        name: INIT_CONTAINER.to_owned(),
        image: Some(image(values, &values.proxy.image)),
        image_pull_policy: Some(pull_policy(values, &values.proxy.image)),
        command: Some(vec!["/usr/lib/linkerd/linkerd2-proxy-init".to_owned()]),
        args: Some(init_args(values)),
        resources: resources(values),
        security_context: Some(init_security(values, subject)),
        termination_message_policy: Some(TERMINATION_POLICY.to_owned()),
        volume_mounts: Some(vec![mount(&init.xt_mount_path.name, &init.xt_mount_path.mount_path)]),
        ..Container::default()
    }
}

fn init_args(values: &Values) -> Vec<String> {
    let (init, proxy) = (&values.proxy_init, &values.proxy);
    let mut args: Vec<String> = Vec::new();
    let programs = match init.iptables_mode {
        IptablesMode::Nft => Some(["iptables-nft", "iptables-nft-save"]),
        // Said, not left out: our init spoken to without a mode prefers netlink.
        IptablesMode::Legacy => Some(["iptables-legacy", "iptables-legacy-save"]),
        // Ours takes netlink then; Linkerd's, where an annotation names its image, still understands the line.
        IptablesMode::Native => None,
    };
    if let Some([restore, save]) = programs {
        args.extend(["--firewall-bin-path", restore, "--firewall-save-bin-path", save].map(str::to_owned));
    }
    if values.disable_ipv6 {
        args.push("--ipv6=false".to_owned());
    }
    let mut arg = |name: &str, value: &str| args.extend([name.to_owned(), value.to_owned()]);
    arg("--incoming-proxy-port", &proxy.ports.inbound.to_string());
    arg("--outgoing-proxy-port", &proxy.ports.outbound.to_string());
    arg("--proxy-uid", &proxy.uid.to_string());
    if proxy.gid >= 0 {
        arg("--proxy-gid", &proxy.gid.to_string());
    }
    let mut skipped = format!("{},{}", proxy.ports.control, proxy.ports.admin);
    if !init.ignore_inbound_ports.is_empty() {
        skipped = format!("{skipped},{}", init.ignore_inbound_ports);
    }
    arg("--inbound-ports-to-ignore", &skipped);
    let optional = [
        ("--outbound-ports-to-ignore", &init.ignore_outbound_ports),
        ("--log-format", &init.log_format),
        ("--log-level", &init.log_level),
        ("--subnets-to-ignore", &init.skip_subnets),
    ];
    for (name, value) in optional.into_iter().filter(|(_, value)| !value.is_empty()) {
        arg(name, value);
    }
    if init.close_wait_timeout_secs > 0 && init.run_as_root {
        arg("--timeout-close-wait-secs", &init.close_wait_timeout_secs.to_string());
    }
    if proxy.inbound_mode == InboundMode::Tproxy {
        args.extend(["--inbound-mode", "tproxy"].map(str::to_owned));
    }
    // Dropping is the default of our init, and Linkerd's has no such flag.
    if values.disable_ipv6 && init.unredirected_ipv6 == "allow" {
        args.push("--unredirected-ipv6=allow".to_owned());
    }
    args
}

fn init_security(values: &Values, subject: &Subject<'_>) -> SecurityContext {
    let init = &values.proxy_init;
    let redirecting = ["NET_ADMIN", NET_RAW].map(str::to_owned);
    // Clusters that want capabilities dropped want that of every container.
    let first = subject.spec.containers.first();
    let security = first.and_then(|container| container.security_context.as_ref());
    let of_first = security
        .and_then(|security| security.capabilities.clone())
        .unwrap_or_default();
    let mut add = redirecting.to_vec();
    add.extend(
        of_first
            .add
            .into_iter()
            .flatten()
            .filter(|name| !redirecting.contains(name)),
    );
    let drop = of_first.drop.map(|mut dropped| {
        dropped.retain(|name| !redirecting.contains(name));
        dropped
    });
    let privileged = init.privileged || (init.close_wait_timeout_secs > 0 && init.run_as_root);
    // An id of 0 is root, which only `runAsRoot` asks for.
    let id = |id: i64| match (init.run_as_root, id) {
        (true, _) => 0,
        (false, 0) => NOBODY,
        (false, id) => id,
    };
    SecurityContext {
        allow_privilege_escalation: Some(privileged),
        privileged: Some(privileged),
        run_as_non_root: Some(!init.run_as_root),
        run_as_user: Some(id(init.run_as_user)),
        run_as_group: Some(id(init.run_as_group)),
        ..confined(Capabilities { add: Some(add), drop })
    }
}

/// What stands in for the init container where a CNI plugin redirects: it proves that it did.
pub(super) fn validator(values: &Values) -> Container {
    let validator = &values.network_validator;
    let outbound = values.proxy.ports.outbound;
    let or = |value: &str, other: String| if value.is_empty() { other } else { value.to_owned() };
    let (connect, listen) = match values.disable_ipv6 {
        true => ("1.1.1.1:20001".to_owned(), format!("0.0.0.0:{outbound}")),
        false => ("[fd00::1]:20001".to_owned(), format!("[::]:{outbound}")),
    };
    let args = [
        ("--log-format", validator.log_format.clone()),
        ("--log-level", validator.log_level.clone()),
        ("--connect-addr", or(&validator.connect_addr, connect)),
        ("--listen-addr", or(&validator.listen_addr, listen)),
        ("--timeout", validator.timeout.clone()),
    ];
    let security = validator.security_context.clone().unwrap_or_else(|| SecurityContext {
        run_as_user: Some(NOBODY),
        run_as_group: Some(NOBODY),
        ..confined(drop_all())
    });
    Container {
        name: VALIDATOR_CONTAINER.to_owned(),
        image: Some(image(values, &values.proxy.image)),
        image_pull_policy: Some(pull_policy(values, &values.proxy.image)),
        command: Some(vec!["/usr/lib/linkerd/linkerd2-network-validator".to_owned()]),
        args: Some(
            args.into_iter()
                .flat_map(|(name, value)| [name.to_owned(), value])
                .collect(),
        ),
        resources: resources(values),
        security_context: Some(security),
        termination_message_policy: Some(TERMINATION_POLICY.to_owned()),
        ..Container::default()
    }
}

/// A container with tools for whoever looks at the pod's network.
pub(super) fn debug(values: &Values) -> Container {
    let debug = &values.debug_container;
    let alive = Probe {
        exec: Some(ExecAction {
            command: Some(vec!["true".to_owned()]),
        }),
        ..Probe::default()
    };
    Container {
        name: DEBUG_CONTAINER.to_owned(),
        image: Some(image(values, &debug.image)),
        image_pull_policy: Some(pull_policy(values, &debug.image)),
        liveness_probe: Some(alive.clone()),
        readiness_probe: Some(alive),
        termination_message_policy: Some(TERMINATION_POLICY.to_owned()),
        ..Container::default()
    }
}

/// The lock of iptables' programs, writable on a read-only root.
pub(super) fn lock_volume(values: &Values) -> Volume {
    empty_dir(&values.proxy_init.xt_mount_path.name, EmptyDirVolumeSource::default())
}

/// The volumes of the sidecar, in the order of the patch.
pub(super) fn proxy_volumes(values: &Values) -> Vec<Volume> {
    let in_memory = EmptyDirVolumeSource {
        medium: Some("Memory".to_owned()),
        ..EmptyDirVolumeSource::default()
    };
    let mut volumes = vec![empty_dir(END_ENTITY_VOLUME, in_memory)];
    if values.proxy.tracing.enabled {
        volumes.push(podinfo());
    }
    if values.identity.service_account_token_projection {
        volumes.push(token());
    }
    volumes
}

fn podinfo() -> Volume {
    let file = |name: &str| DownwardAPIVolumeFile {
        path: name.to_owned(),
        field_ref: Some(ObjectFieldSelector {
            field_path: format!("metadata.{name}"),
            ..ObjectFieldSelector::default()
        }),
        ..DownwardAPIVolumeFile::default()
    };
    Volume {
        name: PODINFO_VOLUME.to_owned(),
        downward_api: Some(DownwardAPIVolumeSource {
            items: Some(vec![file("labels"), file("annotations")]),
            ..DownwardAPIVolumeSource::default()
        }),
        ..Volume::default()
    }
}

fn token() -> Volume {
    let token = ServiceAccountTokenProjection {
        path: TOKEN_NAME.to_owned(),
        expiration_seconds: Some(86_400),
        audience: Some(TOKEN_AUDIENCE.to_owned()),
    };
    Volume {
        name: TOKEN_VOLUME.to_owned(),
        projected: Some(ProjectedVolumeSource {
            sources: Some(vec![VolumeProjection {
                service_account_token: Some(token),
                ..VolumeProjection::default()
            }]),
            ..ProjectedVolumeSource::default()
        }),
        ..Volume::default()
    }
}

/// Where a container of the pod has the token of its service account.
pub(super) fn service_account_mount<'a>(subject: &Subject<'a>) -> Option<&'a VolumeMount> {
    let first = subject.spec.containers.first()?;
    let mut mounts = first.volume_mounts.iter().flatten();
    mounts.find(|mount| mount.mount_path == SERVICE_ACCOUNT_DIR)
}

fn image(values: &Values, image: &Image) -> String {
    format!("{}:{}", image.name, version(values, image))
}

/// The version of an image.
pub(super) fn version<'a>(values: &'a Values, image: &'a Image) -> &'a str {
    match image.version.as_str() {
        "" if image.name == DEBUG_IMAGE => DEBUG_VERSION,
        "" => values.version(),
        version => version,
    }
}

fn pull_policy(values: &Values, image: &Image) -> String {
    match image.pull_policy.as_str() {
        "" => values.image_pull_policy.clone(),
        policy => policy.to_owned(),
    }
}

/// Init and proxy share these.
fn resources(values: &Values) -> Option<ResourceRequirements> {
    let resources = &values.proxy.resources;
    let all = [
        ("cpu", &resources.cpu),
        ("memory", &resources.memory),
        ("ephemeral-storage", &resources.ephemeral_storage),
    ];
    let side = |pick: fn(&Constraints) -> &String| {
        let set = all.iter().filter(|(_, constraints)| !pick(constraints).is_empty());
        let side: BTreeMap<_, _> = set
            .map(|(name, constraints)| ((*name).to_owned(), Quantity(pick(constraints).clone())))
            .collect();
        (!side.is_empty()).then_some(side)
    };
    let (requests, limits) = (
        side(|constraints| &constraints.request),
        side(|constraints| &constraints.limit),
    );
    (requests.is_some() || limits.is_some()).then(|| ResourceRequirements {
        requests,
        limits,
        ..ResourceRequirements::default()
    })
}

fn confined(capabilities: Capabilities) -> SecurityContext {
    SecurityContext {
        allow_privilege_escalation: Some(false),
        capabilities: Some(capabilities),
        read_only_root_filesystem: Some(true),
        run_as_non_root: Some(true),
        seccomp_profile: Some(SeccompProfile {
            type_: "RuntimeDefault".to_owned(),
            ..SeccompProfile::default()
        }),
        ..SecurityContext::default()
    }
}

fn drop_all() -> Capabilities {
    Capabilities {
        add: None,
        drop: Some(vec!["ALL".to_owned()]),
    }
}

fn mount(volume: &str, path: &str) -> VolumeMount {
    VolumeMount {
        name: volume.to_owned(),
        mount_path: path.to_owned(),
        ..VolumeMount::default()
    }
}

fn empty_dir(name: &str, source: EmptyDirVolumeSource) -> Volume {
    Volume {
        name: name.to_owned(),
        empty_dir: Some(source),
        ..Volume::default()
    }
}

pub(super) const END_ENTITY_VOLUME: &str = "linkerd-identity-end-entity";
pub(super) const TOKEN_VOLUME: &str = "linkerd-identity-token";
pub(super) const PODINFO_VOLUME: &str = "linkerd-podinfo";
const TERMINATION_POLICY: &str = "FallbackToLogsOnError";
/// Lets a proxy have addresses that are not its pod's.
const NET_RAW: &str = "NET_RAW";
/// The user that owns nothing.
const NOBODY: i64 = 65_534;
