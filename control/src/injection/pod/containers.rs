//! The containers and volumes that injection adds.

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

use crate::injection::pod::env::{END_ENTITY_DIR, PODINFO_DIR, SERVICE_ACCOUNT_DIR, TOKEN_DIR, TOKEN_NAME};
use crate::injection::target::{
    DEBUG_CONTAINER, INIT_CONTAINER, InjectionTarget, PROXY_CONTAINER, VALIDATOR_CONTAINER,
};
use crate::injection::values::{
    Constraints, Image, InboundMode, IptablesMode, LINKERD_DEBUG_IMAGE, LINKERD_DEBUG_IMAGE_VERSION,
    Probe as ProbeValues, Values,
};

/// The proxy container.
pub(in crate::injection) fn proxy(values: &Values, target: &InjectionTarget<'_>, env: Vec<EnvVar>) -> Container {
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
    let probe = |path: &str, values: &ProbeValues, delay: i32| Probe {
        http_get: Some(http(path)),
        initial_delay_seconds: Some(values.initial_delay_seconds.unwrap_or(delay)),
        timeout_seconds: Some(values.timeout_seconds),
        ..Probe::default()
    };
    // The kubelet starts the next containers after this probe of a native sidecar has succeeded.
    let startup = (proxy.native_sidecar && proxy.await_proxy).then(|| Probe {
        http_get: Some(http("/ready")),
        initial_delay_seconds: Some(proxy.startup_probe.initial_delay_seconds),
        period_seconds: Some(proxy.startup_probe.period_seconds),
        failure_threshold: Some(proxy.startup_probe.failure_threshold),
        ..Probe::default()
    });
    let mut mounts = vec![volume_mount(END_ENTITY_VOLUME, END_ENTITY_DIR)];
    if values.identity.service_account_token_projection {
        mounts.push(volume_mount(TOKEN_VOLUME, TOKEN_DIR));
    }
    if proxy.tracing.enabled {
        mounts.push(volume_mount(PODINFO_VOLUME, PODINFO_DIR));
    }
    mounts.extend(service_account_mount(target).cloned());
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
        security_context: Some(proxy_security_context(values)),
        termination_message_policy: Some(TERMINATION_POLICY.to_owned()),
        volume_mounts: Some(mounts),
        ..Container::default()
    }
}

/// The lifecycle hooks of the proxy: the application can wait for a sidecar that is not native, and the proxy can wait before it
/// stops.
fn lifecycle(values: &Values) -> Option<Lifecycle> {
    let proxy = &values.proxy;
    let exec = |command: Vec<String>| LifecycleHandler {
        exec: Some(ExecAction { command: Some(command) }),
        ..LifecycleHandler::default()
    };
    let post_start = (!proxy.native_sidecar && proxy.await_proxy).then(|| {
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

/// The security context of the proxy. The values can replace the default one, except for the fields that the redirection requires:
/// the user and group that the init container excludes, and `NET_RAW` for `tproxy`.
fn proxy_security_context(values: &Values) -> SecurityContext {
    let proxy = &values.proxy;
    let default = || restricted_security_context(drop_all());
    let mut security = proxy.security_context.clone().unwrap_or_else(default);
    if let Some(capabilities) = &proxy.capabilities {
        security.capabilities = Some(capabilities.clone());
    }
    if proxy.inbound_mode == InboundMode::Tproxy {
        let capabilities = security.capabilities.get_or_insert_default();
        let added = capabilities.add.get_or_insert_default();
        if !added.iter().any(|name| name == NET_RAW) {
            added.push(NET_RAW.to_owned());
        }
    }
    SecurityContext {
        run_as_user: Some(proxy.uid),
        run_as_group: (proxy.gid >= 0).then_some(proxy.gid).or(security.run_as_group),
        ..security
    }
}

/// The init container that redirects the pod's traffic.
pub(in crate::injection) fn init(values: &Values, target: &InjectionTarget<'_>) -> Container {
    let init = &values.proxy_init;
    Container {
        name: INIT_CONTAINER.to_owned(),
        image: Some(image(values, &values.proxy.image)),
        image_pull_policy: Some(pull_policy(values, &values.proxy.image)),
        command: Some(vec!["/usr/lib/linkerd/linkerd2-proxy-init".to_owned()]),
        args: Some(init_args(values)),
        resources: resources(values),
        security_context: Some(init_security_context(values, target)),
        termination_message_policy: Some(TERMINATION_POLICY.to_owned()),
        volume_mounts: Some(vec![volume_mount(
            &init.xt_mount_path.name,
            &init.xt_mount_path.mount_path,
        )]),
        ..Container::default()
    }
}

fn init_args(values: &Values) -> Vec<String> {
    let (init, proxy) = (&values.proxy_init, &values.proxy);
    let mut args: Vec<String> = Vec::new();
    // Without these arguments our init container uses netlink. Linkerd's image, if an annotation sets it, has its own default.
    let programs = match init.iptables_mode {
        IptablesMode::Nft => Some(["iptables-nft", "iptables-nft-save"]),
        IptablesMode::Legacy => Some(["iptables-legacy", "iptables-legacy-save"]),
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
    // Without tap the proxy does not listen on the control port, and the application can.
    let mut skipped = match proxy.tap.enabled {
        true => format!("{},{}", proxy.ports.control, proxy.ports.admin),
        false => proxy.ports.admin.to_string(),
    };
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
    // `drop` is the default of our init container; Linkerd's init container does not have this flag.
    if values.disable_ipv6 && init.unredirected_ipv6 == "allow" {
        args.push("--unredirected-ipv6=allow".to_owned());
    }
    args
}

fn init_security_context(values: &Values, target: &InjectionTarget<'_>) -> SecurityContext {
    let init = &values.proxy_init;
    let redirecting = ["NET_ADMIN", NET_RAW].map(str::to_owned);
    // Pod Security can require `drop: [ALL]` of every container. The application's containers then have it, so the init container
    // copies the capabilities of the first container.
    let first = target.spec.containers.first();
    let security = first.and_then(|container| container.security_context.as_ref());
    let first_capabilities = security
        .and_then(|security| security.capabilities.clone())
        .unwrap_or_default();
    let mut add = redirecting.to_vec();
    add.extend(
        first_capabilities
            .add
            .into_iter()
            .flatten()
            .filter(|name| !redirecting.contains(name)),
    );
    let drop = first_capabilities.drop.map(|mut dropped| {
        dropped.retain(|name| !redirecting.contains(name));
        dropped
    });
    let privileged = init.privileged || (init.close_wait_timeout_secs > 0 && init.run_as_root);
    // With `runAsRoot` the id is 0. Without `runAsRoot`, the id 0 is replaced by the id of `nobody`.
    let id = |id: i64| match (init.run_as_root, id) {
        (true, _) => 0,
        (false, 0) => NOBODY_UID,
        (false, id) => id,
    };
    SecurityContext {
        allow_privilege_escalation: Some(privileged),
        privileged: Some(privileged),
        run_as_non_root: Some(!init.run_as_root),
        run_as_user: Some(id(init.run_as_user)),
        run_as_group: Some(id(init.run_as_group)),
        ..restricted_security_context(Capabilities { add: Some(add), drop })
    }
}

/// The container that checks the redirection of a CNI plugin. It replaces the init container.
pub(in crate::injection) fn validator(values: &Values) -> Container {
    let validator = &values.network_validator;
    let outbound = values.proxy.ports.outbound;
    let or_default = |value: &str, default: String| if value.is_empty() { default } else { value.to_owned() };
    let (connect, listen) = match values.disable_ipv6 {
        true => ("1.1.1.1:20001".to_owned(), format!("0.0.0.0:{outbound}")),
        false => ("[fd00::1]:20001".to_owned(), format!("[::]:{outbound}")),
    };
    let args = [
        ("--log-format", validator.log_format.clone()),
        ("--log-level", validator.log_level.clone()),
        ("--connect-addr", or_default(&validator.connect_addr, connect)),
        ("--listen-addr", or_default(&validator.listen_addr, listen)),
        ("--timeout", validator.timeout.clone()),
    ];
    let security = validator.security_context.clone().unwrap_or_else(|| SecurityContext {
        run_as_user: Some(NOBODY_UID),
        run_as_group: Some(NOBODY_UID),
        ..restricted_security_context(drop_all())
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

/// The debug container, which has network tools.
pub(in crate::injection) fn debug(values: &Values) -> Container {
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

/// Volume for the lock file of the iptables programs, because the root file system is read-only.
pub(in crate::injection) fn xtables_lock_volume(values: &Values) -> Volume {
    empty_dir(&values.proxy_init.xt_mount_path.name, EmptyDirVolumeSource::default())
}

/// The volumes of the proxy container, in the order of the patch.
pub(in crate::injection) fn proxy_volumes(values: &Values) -> Vec<Volume> {
    let in_memory = EmptyDirVolumeSource {
        medium: Some("Memory".to_owned()),
        ..EmptyDirVolumeSource::default()
    };
    let mut volumes = vec![empty_dir(END_ENTITY_VOLUME, in_memory)];
    if values.proxy.tracing.enabled {
        volumes.push(podinfo_volume());
    }
    if values.identity.service_account_token_projection {
        volumes.push(token_volume());
    }
    volumes
}

fn podinfo_volume() -> Volume {
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

fn token_volume() -> Volume {
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

/// The mount of the service account token in the first container.
pub(in crate::injection) fn service_account_mount<'a>(target: &InjectionTarget<'a>) -> Option<&'a VolumeMount> {
    let first = target.spec.containers.first()?;
    let mut mounts = first.volume_mounts.iter().flatten();
    mounts.find(|mount| mount.mount_path == SERVICE_ACCOUNT_DIR)
}

fn image(values: &Values, image: &Image) -> String {
    format!("{}:{}", image.name, image_version(values, image))
}

/// The version of an image, or the default version.
pub(in crate::injection) fn image_version<'a>(values: &'a Values, image: &'a Image) -> &'a str {
    match image.version.as_str() {
        "" if image.name == LINKERD_DEBUG_IMAGE => LINKERD_DEBUG_IMAGE_VERSION,
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

/// Resources of the proxy, the init container and the validator.
fn resources(values: &Values) -> Option<ResourceRequirements> {
    let resources = &values.proxy.resources;
    let all = [
        ("cpu", &resources.cpu),
        ("memory", &resources.memory),
        ("ephemeral-storage", &resources.ephemeral_storage),
    ];
    let quantities = |pick: fn(&Constraints) -> &String| {
        let set = all.iter().filter(|(_, constraints)| !pick(constraints).is_empty());
        let quantities: BTreeMap<_, _> = set
            .map(|(name, constraints)| ((*name).to_owned(), Quantity(pick(constraints).clone())))
            .collect();
        (!quantities.is_empty()).then_some(quantities)
    };
    let (requests, limits) = (
        quantities(|constraints| &constraints.request),
        quantities(|constraints| &constraints.limit),
    );
    (requests.is_some() || limits.is_some()).then(|| ResourceRequirements {
        requests,
        limits,
        ..ResourceRequirements::default()
    })
}

fn restricted_security_context(capabilities: Capabilities) -> SecurityContext {
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

fn volume_mount(volume: &str, path: &str) -> VolumeMount {
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

pub(in crate::injection) const END_ENTITY_VOLUME: &str = "linkerd-identity-end-entity";
pub(in crate::injection) const TOKEN_VOLUME: &str = "linkerd-identity-token";
pub(in crate::injection) const PODINFO_VOLUME: &str = "linkerd-podinfo";
const TERMINATION_POLICY: &str = "FallbackToLogsOnError";
/// Capability of raw sockets. The iptables-legacy programs of the init container need it, and with `tproxy` the proxy needs it to
/// use the addresses of its clients as source addresses.
const NET_RAW: &str = "NET_RAW";
/// User and group `nobody`.
const NOBODY_UID: i64 = 65_534;
