//! Real Kubernetes for the tests.
//!
//! [`ApiServer`] is etcd and an API server on its own loopback address, for tests that need no running pod. Many tests
//! have one each at the same time.
//! [`Cluster`] also has nodes, each in its own network namespace, and DNS, so pods run.
//! Programs come from Debian and from `./run setup`; the error names a missing program.

mod addresses;
mod api_server;
mod audit;
mod cgroups;
mod cleanup;
#[expect(clippy::module_inception, reason = "the main type of the module")]
mod cluster;
mod component;
pub mod kubeconfig;
mod kubernetes_components;
mod load_balancers;
mod node;
mod pair;
mod pki;
mod processes;
mod router;
mod slot;

pub use addresses::ClusterAddresses;
pub use api_server::{ApiServer, Controllers, Options, create_account, create_namespace};
pub use audit::{AuditObject, AuditPolicy, AuditRecord, AuditStatus, AuditUser};
pub use cluster::{
    Cluster, ClusterOptions, MAX_NODES, command_on_first_detached_node, is_detached_running, load_archive_on_detached,
    stop_detached,
};
pub use node::Node;
pub use pair::{ClusterPair, PairNetwork};
pub use router::{Connection, Cut};
