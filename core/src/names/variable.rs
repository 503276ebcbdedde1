//! Environment variables of the programs other than the proxy, which documents its own.

/// A variable with its documentation. Texts are Markdown, for a cell of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variable {
    pub name: &'static str,
    /// The programs that read it.
    pub programs: &'static str,
    pub values: &'static str,
    pub default: &'static str,
    pub meaning: &'static str,
}

/// Declares the constants and [`ALL`] from one table, so that there is no name without documentation.
macro_rules! variables {
    ($($constant:ident = $name:literal {
        programs: $programs:literal,
        values: $values:literal,
        default: $default:literal,
        meaning: $meaning:literal,
    })*) => {
        $(
            #[doc = $meaning]
            pub const $constant: &str = $name;
        )*

        /// All variables, in the order of the documentation.
        pub const ALL: &[Variable] = &[$(
            Variable {
                name: $name,
                programs: $programs,
                values: $values,
                default: $default,
                meaning: $meaning,
            },
        )*];
    };
}

variables! {
    HOSTNAME = "HOSTNAME" {
        programs: "`tulle-control`",
        values: "name of a pod",
        default: "the name of the host",
        meaning: "The name of this replica in leases and Events. Kubernetes sets it.",
    }
    WORKER_THREADS = "TOKIO_WORKER_THREADS" {
        programs: "`tulle-control`",
        values: "number from 1",
        default: "one per four CPUs, at least one",
        meaning: "The number of threads that watch the API server and serve streams. Liveness, webhooks and telemetry have threads of their own.",
    }
    NAMESPACE = "LINKERD_NAMESPACE" {
        programs: "`tulle`",
        values: "name of a namespace",
        default: "`linkerd`",
        meaning: "The namespace of the control plane, unless the flag `--linkerd-namespace` names one.",
    }
    KUBECONFIG = "KUBECONFIG" {
        programs: "`tulle`, `tulle-control` outside of a cluster, `tulle-bench control-scale` and `mirror-scale`",
        values: "paths of kubeconfig files, separated by colons",
        default: "`~/.kube/config`",
        meaning: "The kubeconfig, unless the flag `--kubeconfig` names one.",
    }
    VALIDATOR_LOG_FORMAT = "LINKERD_NETWORK_VALIDATOR_LOG_FORMAT" {
        programs: "`tulle-init validate`",
        values: "`plain` or `json`",
        default: "`plain`",
        meaning: "The format of log lines, unless the flag `--log-format` names one.",
    }
    VALIDATOR_LOG_LEVEL = "LINKERD_NETWORK_VALIDATOR_LOG_LEVEL" {
        programs: "`tulle-init validate`",
        values: "`trace`, `debug`, `info`, `warn` or `error`; an unknown one means `info`",
        default: "`info`",
        meaning: "The minimum level of log lines, unless the flag `--log-level` names one.",
    }
    AWAIT_VERBOSE = "LINKERD_AWAIT_VERBOSE" {
        programs: "`linkerd-await`",
        values: "any text",
        default: "none",
        meaning: "Set and not empty, it is the same as `--verbose`.",
    }
    AWAIT_DISABLED = "LINKERD_AWAIT_DISABLED" {
        programs: "`linkerd-await`",
        values: "any text",
        default: "none",
        meaning: "If it is set and not empty, `linkerd-await` neither waits for the proxy nor shuts it down.",
    }
    DISABLED = "LINKERD_DISABLED" {
        programs: "`linkerd-await`",
        values: "any text",
        default: "none",
        meaning: "As `LINKERD_AWAIT_DISABLED`.",
    }
}
