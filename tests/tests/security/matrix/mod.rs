//! The policy matrix: which connections to a sidecar are permitted, and which are refused with which cause.
