//! Real Kubernetes for the tests.
//!
//! [`ApiServer`] is etcd and an API server on a loopback address of its own, for all that needs no pod to run: many tests
//! have one each at the same time.
//! [`Cluster`] has nodes as well, each in a network namespace of its own, and DNS: pods run.
//! Programs come from Debian and from `./run setup`; when one is missing, the error says so.

mod api_server;
mod audit;
mod cgroups;
#[expect(clippy::module_inception, reason = "the room's main type")]
mod cluster;
mod component;
mod control_plane;
mod kubeconfig;
mod leftovers;
mod node;
mod pki;

pub use api_server::{ApiServer, Controllers, Options};
pub use audit::{AuditObject, AuditPolicy, AuditRecord, AuditStatus, AuditUser};
pub use cluster::{Cluster, ClusterOptions, MOST_NODES, down, inside, load_archive};
pub use node::Node;
