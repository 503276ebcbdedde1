//! The replacements in the commands of the pages, each with its reason.

/// Text of pages that is replaced before a block is run.
pub(super) struct Replacement {
    /// The start of the page's path.
    pub(super) pages: &'static str,
    pub(super) from: &'static str,
    /// `@name` is a value of the test, such as a directory.
    pub(super) to: &'static str,
    #[expect(dead_code, reason = "for readers")]
    pub(super) why: &'static str,
}

const fn replaced(pages: &'static str, from: &'static str, to: &'static str, why: &'static str) -> Replacement {
    Replacement { pages, from, to, why }
}

const UNPUBLISHED: &str = "no registry has the charts";
const SAME_VERSION: &str = "the charts of the repository have only one version";
const ENDLESS: &str = "the command does not end by itself";
const BACKGROUND: &str = "a reader waits for the message `Forwarding from`; the script has to as well";
const HELM_RELEASE: &str = "the Helm release of the test has another name than one of Linkerd";

/// Applied in this order.
pub(super) const REPLACEMENTS: &[Replacement] = &[
    replaced(
        "how-to/install.md",
        "helm pull --untar oci://ghcr.io/tulle-mesh/charts/tulle-control-plane --version 0.1.0",
        "cp -r @charts/tulle-control-plane .",
        UNPUBLISHED,
    ),
    replaced(
        "how-to/replace-linkerd.md",
        "template linkerd-control-plane oci:",
        "template tulle-control-plane oci:",
        HELM_RELEASE,
    ),
    replaced(
        "how-to/replace-linkerd.md",
        "upgrade linkerd-control-plane oci:",
        "upgrade tulle-control-plane oci:",
        HELM_RELEASE,
    ),
    replaced(
        "how-to/replace-linkerd.md",
        "values linkerd-control-plane",
        "values tulle-control-plane",
        HELM_RELEASE,
    ),
    replaced(
        "how-to/replace-linkerd.md",
        "history linkerd-control-plane",
        "history tulle-control-plane",
        HELM_RELEASE,
    ),
    replaced(
        "how-to/replace-linkerd.md",
        "rollback linkerd-control-plane",
        "rollback tulle-control-plane",
        HELM_RELEASE,
    ),
    replaced(
        "how-to/replace-linkerd.md",
        "kubectl diff -f -",
        "kubectl diff -f - || [ $? = 1 ]",
        "the expected differences cause the exit code 1",
    ),
    replaced(
        "how-to/",
        "oci://ghcr.io/tulle-mesh/charts/tulle-crds --version 0.1.0",
        "@charts/tulle-crds",
        UNPUBLISHED,
    ),
    replaced(
        "how-to/",
        "oci://ghcr.io/tulle-mesh/charts/tulle-control-plane --version 0.1.0",
        "@charts/tulle-control-plane",
        UNPUBLISHED,
    ),
    replaced(
        "how-to/upgrade.md",
        "oci://ghcr.io/tulle-mesh/charts/tulle-crds --version NEW",
        "@charts/tulle-crds",
        SAME_VERSION,
    ),
    replaced(
        "how-to/upgrade.md",
        "oci://ghcr.io/tulle-mesh/charts/tulle-control-plane --version NEW",
        "@charts/tulle-control-plane",
        SAME_VERSION,
    ),
    replaced(
        "how-to/upgrade.md",
        "=OLD",
        concat!("=", env!("CARGO_PKG_VERSION")),
        SAME_VERSION,
    ),
    replaced(
        "how-to/cert-manager.md",
        "certificate/linkerd-identity-issuer secret/",
        "secret/",
        "the test creates the Secret without cert-manager",
    ),
    replaced(
        "how-to/",
        "REVISION",
        "@revision",
        "the number that `helm history` shows",
    ),
    replaced(
        "how-to/monitoring.md",
        "tulle charts/tulle-control-plane",
        "tulle @charts/tulle-control-plane",
        "the command does not run in a clone of the repository",
    ),
    replaced(
        "how-to/policy.md",
        "10.1.0.0/16",
        "@balancer/32",
        "the address of the pod that acts as the balancer",
    ),
    replaced(
        "how-to/monitoring.md",
        "10.1.0.0/16",
        "@balancer/32",
        "the address of the pod that acts as Prometheus",
    ),
    replaced(
        "how-to/policy.md",
        "value: /public",
        "value: /headers",
        "a path that the application of the test serves",
    ),
    replaced(
        "how-to/policy.md",
        "requestsPerSecond: 1000",
        "requestsPerSecond: 10",
        "fewer requests reach this limit",
    ),
    replaced(
        "how-to/debug-a-request.md",
        "curl -si http://web.shop/",
        "kubectl exec -n shop deploy/other -c other -- curl -si http://web.shop/",
        "the client is in the cluster",
    ),
    replaced(
        "how-to/debug-a-request.md",
        "tulle tap deploy/web",
        "tulle tap --count 20 deploy/web",
        ENDLESS,
    ),
    replaced(
        "how-to/debug-a-request.md",
        "deploy/front 4191 &",
        "deploy/front 4191 >forwarded & until grep -q Forwarding forwarded; do sleep 0.1; done",
        BACKGROUND,
    ),
    replaced(
        "how-to/replace-linkerd.md",
        "deploy/web 4191 &",
        "deploy/web 4191 >forwarded & until grep -q Forwarding forwarded; do sleep 0.1; done",
        BACKGROUND,
    ),
    replaced(
        "how-to/gitops.md",
        "helm template …",
        "helm template tulle-control-plane @charts/tulle-control-plane -n linkerd --kube-version 1.34 -f values.yaml \
         -f @charts/tulle-control-plane/values-ha.yaml --set identity.externalCA=true --set identity.issuer.scheme=kubernetes.io/tls",
        "the command of step 1, with the values of the installation",
    ),
    replaced(
        "how-to/replace-linkerd.md",
        "name: cr.l5d.io/linkerd/proxy, version: edge-26.8.3",
        "name: ghcr.io/tulle-mesh/proxy, version: 0.1.0",
        "the image that the nodes have",
    ),
    replaced(
        "how-to/air-gapped.md",
        "registry.example.com/mesh",
        "ghcr.io/tulle-mesh",
        "the images are on the nodes, by these names",
    ),
    replaced(
        "how-to/air-gapped.md",
        "./tulle-crds-0.1.0.tgz",
        "@charts/tulle-crds",
        UNPUBLISHED,
    ),
    replaced(
        "how-to/air-gapped.md",
        "./tulle-control-plane-0.1.0.tgz",
        "@charts/tulle-control-plane",
        UNPUBLISHED,
    ),
];
