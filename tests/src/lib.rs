//! The test harness: a control plane, proxies and applications in one process, or real Kubernetes.

pub mod apps;
pub mod charts;
pub mod client;
pub mod cluster;
pub mod commands;
pub mod control;
pub mod credentials;
pub mod eventually;
pub mod fake_policy_service;
pub mod hosts;
pub mod images;
pub mod linked_clusters;
pub mod linkerd;
pub mod load;
pub mod machine;
pub mod mesh;
pub mod meshed;
pub mod programs;
