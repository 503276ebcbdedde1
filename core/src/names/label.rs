//! Labels of Kubernetes objects, and of manifests in a directory.

/// A label with its documentation. Texts are Markdown, for a cell of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label {
    /// The whole name, or its prefix if there is a `placeholder`.
    pub name: &'static str,
    /// The word for the rest of the name if `name` is a prefix, otherwise empty.
    pub placeholder: &'static str,
    /// The kinds of objects that have it.
    pub objects: &'static str,
    pub set_by: &'static str,
    pub meaning: &'static str,
}

/// Declares the constants and [`ALL`] from one table, so that there is no name without documentation.
macro_rules! labels {
    ($($constant:ident = $name:literal $(+ $placeholder:literal)? {
        objects: $objects:literal,
        set_by: $set_by:literal,
        meaning: $meaning:literal,
    })*) => {
        $(
            #[doc = $meaning]
            pub const $constant: &str = $name;
        )*

        /// All labels, in the order of the documentation.
        pub const ALL: &[Label] = &[$(
            Label {
                name: $constant,
                placeholder: concat!($($placeholder)?),
                objects: $objects,
                set_by: $set_by,
                meaning: $meaning,
            },
        )*];
    };
}

labels! {
    ADMISSION_WEBHOOKS = "config.linkerd.io/admission-webhooks" {
        objects: "Namespace",
        set_by: "users, with the value `disabled`",
        meaning: "Exempts the namespace from all admission webhooks. As an annotation it has no effect.",
    }
    CONTROL_PLANE_NS = "linkerd.io/control-plane-ns" {
        objects: "Pod, objects of the control plane",
        set_by: "the injector, the charts",
        meaning: "The namespace of the control plane. A pod with this label is meshed.",
    }
    WORKLOAD_NS = "linkerd.io/workload-ns" {
        objects: "Pod",
        set_by: "the injector, the charts",
        meaning: "The namespace of the pod.",
    }
    PROXY_OWNER_PREFIX = "linkerd.io/proxy-" + "KIND" {
        objects: "Pod",
        set_by: "the injector",
        meaning: "The name of the pod's owner. KIND is the kind of the owner: `deployment`, `replicaset`, \
                  `replicationcontroller`, `daemonset`, `statefulset` or `job`; by `tulle inject --manual` also \
                  `cronjob`.",
    }
    CONTROL_PLANE_COMPONENT = "linkerd.io/control-plane-component" {
        objects: "Pod, Service",
        set_by: "the charts",
        meaning: "The component of the control plane, such as `destination`. Its pods and services are never injected.",
    }
    IS_CONTROL_PLANE = "linkerd.io/is-control-plane" {
        objects: "Namespace",
        set_by: "`tulle install`, with the value `true`",
        meaning: "Marks the namespace of the control plane.",
    }
    EXTENSION = "linkerd.io/extension" {
        objects: "Namespace",
        set_by: "the charts of extensions",
        meaning: "The name of the extension in the namespace, such as `viz`. `tulle uninstall` refuses while there are extensions.",
    }
    CNI_RESOURCE = "linkerd.io/cni-resource" {
        objects: "Pod, Service",
        set_by: "the chart of the CNI plugin",
        meaning: "Marks the objects of a CNI plugin, which are never injected.",
    }
    HEADLESS_MIRROR = "mirror.linkerd.io/headless-mirror-svc-name" {
        objects: "Service",
        set_by: "the service mirror",
        meaning: "On the mirror of one pod of a headless Service: the name of the mirror of that Service.",
    }
    MIRRORED_CLUSTER = "mirror.linkerd.io/cluster-name" {
        objects: "Service, Endpoints, EndpointSlice, Namespace",
        set_by: "the service mirror",
        meaning: "The cluster of a mirrored Service, which is the label `dst_target_cluster` in metrics.",
    }
    MIRRORED_SERVICE = "mirror.linkerd.io/mirrored-service" {
        objects: "Service, Endpoints, Namespace",
        set_by: "the service mirror, with the value `true`",
        meaning: "Marks what the service mirror created: mirrors, federated Services, and namespaces for them.",
    }
    MIRRORED_GATEWAY = "mirror.linkerd.io/mirrored-gateway" {
        objects: "Service",
        set_by: "the service mirror, or the chart of the multicluster extension, with the value `true`",
        meaning: "Marks a Service through which the gateway of a linked cluster is probed.",
    }
    FEDERATED = "mirror.linkerd.io/federated" {
        objects: "Service",
        set_by: "users, with the value `member`",
        meaning: "The Service joins the federated Service of its name in linked clusters.",
    }
    EXPORTED = "mirror.linkerd.io/exported" {
        objects: "Service",
        set_by: "users, with the value `true`, or `remote-discovery` if other clusters can connect to its pods",
        meaning: "The Service is mirrored in linked clusters. A Link can select by other labels.",
    }
    REMOTE_DISCOVERY = "multicluster.linkerd.io/remote-discovery" {
        objects: "Service",
        set_by: "the service mirror",
        meaning: "The cluster that has the endpoints of a mirror without a gateway.",
    }
    REMOTE_SERVICE = "multicluster.linkerd.io/remote-service" {
        objects: "Service",
        set_by: "the service mirror",
        meaning: "The name of the mirrored Service in the cluster that has its endpoints.",
    }
    CREDENTIALS_OF_CLUSTER = "multicluster.linkerd.io/cluster-name" {
        objects: "Secret",
        set_by: "`tulle multicluster link-gen`",
        meaning: "Of a Secret in the namespace of the control plane: the cluster to which it gives access.",
    }
    APP_INSTANCE = "app.kubernetes.io/instance" {
        objects: "Pod",
        set_by: "the user",
        meaning: "The service name in traces, unless the annotation `resource.opentelemetry.io/service.name` is set.",
    }
    APP_NAME = "app.kubernetes.io/name" {
        objects: "Pod",
        set_by: "the user",
        meaning: "The service name in traces of a pod without the label `app.kubernetes.io/instance`.",
    }
    POD_TEMPLATE_HASH = "pod-template-hash" {
        objects: "Pod",
        set_by: "Kubernetes",
        meaning: "The version of the pod template, which is the label `dst_pod_template_hash` in metrics.",
    }
    NAMESPACE_NAME = "kubernetes.io/metadata.name" {
        objects: "Namespace",
        set_by: "Kubernetes",
        meaning: "The name of the namespace, by which the injector's webhook exempts `kube-system` and `cert-manager`.",
    }
    ZONE = "topology.kubernetes.io/zone" {
        objects: "Node, ExternalWorkload",
        set_by: "Kubernetes; on an ExternalWorkload, the user",
        meaning: "The zone of a node or workload, for topology hints and for metrics.",
    }
    SERVICE_NAME = "kubernetes.io/service-name" {
        objects: "EndpointSlice",
        set_by: "Kubernetes; the control plane, for external workloads",
        meaning: "The Service to which the endpoints belong.",
    }
    SLICE_MANAGED_BY = "endpointslice.kubernetes.io/managed-by" {
        objects: "EndpointSlice",
        set_by: "Kubernetes; the control plane, for external workloads",
        meaning: "What has written the slice. The control plane changes only slices with its own value, \
                  `linkerd-external-workloads-controller`.",
    }
    HEADLESS = "service.kubernetes.io/headless" {
        objects: "EndpointSlice",
        set_by: "Kubernetes; the control plane, for external workloads",
        meaning: "Marks the slices of a headless Service.",
    }
}
