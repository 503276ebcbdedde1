//! The limits of a port, derived from the files and the memory of the process.

use std::time::Duration;

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of connections, over all clients.
    pub connections: usize,
    pub call_kind: CallKind,
    /// Maximum number of concurrent streams per client, over all its connections: by address for clients with a certificate, by
    /// network for all others.
    pub streams_per_client: usize,
    /// Memory for requests, in bytes. [`CallKind`] determines which requests take a part of it.
    pub request_memory: usize,
    /// Age at which a connection is closed gracefully, plus or minus a fifth, so that connections that began together do not end
    /// together.
    pub connection_age: Duration,
}

/// The kind of calls on a port. The limits depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallKind {
    /// Calls with one response, by clients that are usually not verified yet. Each request takes a part of
    /// [`Limits::request_memory`] until its response begins.
    Unary,
    /// Streams of responses without an end, by clients that are usually verified. A request takes a part of
    /// [`Limits::request_memory`] until its response begins. A request of a verified client takes it only if the request does
    /// not arrive as a whole. Verified clients have half of the memory, all others have the other half.
    Streaming,
}

impl Limits {
    /// Returns the limits of one port for a process that may open `files` files and use `memory` bytes.
    pub fn from_resources(files: usize, memory: Option<u64>, call_kind: CallKind) -> Self {
        let streams_per_client = call_kind.max_streams_per_client(memory);
        // Half of the memory is for connections, the other half for the requests on them.
        let memory = memory.map_or(u64::MAX, |memory| memory / 2 / MAX_GRPC_PORTS);
        let memory = usize::try_from(memory).unwrap_or(usize::MAX);
        Self {
            // The remaining file descriptors are for webhooks, the admin server and outgoing connections.
            connections: (files / 5).min(memory / BYTES_PER_CONNECTION).max(1),
            call_kind,
            streams_per_client,
            request_memory: memory,
            connection_age: CONNECTION_AGE,
        }
    }

    pub(super) fn random_connection_age(&self) -> Duration {
        self.connection_age
            .mul_f64(1.0 + CONNECTION_AGE_JITTER * (2.0 * fastrand::f64() - 1.0))
    }
}

impl CallKind {
    /// Returns the limit of streams per client for a process that may use `memory` bytes.
    pub(super) fn max_streams_per_client(self, memory: Option<u64>) -> usize {
        match self {
            // The number of requests of one client that the queue for token reviews accepts. Pods can share the address of
            // their node.
            Self::Unary => 64,
            Self::Streaming => {
                let max = memory.map_or(u64::MAX, |memory| memory / 8 / STREAMING_PORTS / BYTES_PER_STREAM);
                let max = usize::try_from(max).unwrap_or(usize::MAX);
                max.clamp(MIN_STREAMS_PER_CLIENT, MAX_STREAMS_PER_CLIENT)
            }
        }
    }

    /// Returns the value of SETTINGS_MAX_CONCURRENT_STREAMS for a connection.
    pub(super) fn max_streams_per_connection(self) -> u32 {
        match self {
            // A proxy sends one request at a time.
            Self::Unary => 16,
            // Above the limit per client, so that the server refuses an excess stream with RESOURCE_EXHAUSTED and a message.
            Self::Streaming => 100_000,
        }
    }

    /// Returns the maximum request size in bytes, which is several times that of the largest valid request.
    pub(super) fn max_request_bytes(self) -> usize {
        match self {
            // Above the limit of the identity service, which refuses a longer request with a message.
            Self::Unary => 72 * 1024,
            Self::Streaming => 16 * 1024,
        }
    }

    /// Returns the maximum memory of a request: its bytes, the buffer in which they are decoded, and the stream.
    pub(super) fn bytes_per_request(self) -> usize {
        self.max_request_bytes() + 16 * 1024
    }
}

/// Maximum number of gRPC ports of a process: destination, policy and identity.
const MAX_GRPC_PORTS: u64 = 3;
/// Number of gRPC ports with streams: destination and policy.
const STREAMING_PORTS: u64 = 2;
/// Memory of a stream over HTTP/2, not counting a value to which only this stream subscribes. Measured: 3.6 KB.
const BYTES_PER_STREAM: u64 = 4 << 10;
/// Maximum number of streams per client, however much memory the process has. A proxy opens at most two streams on a port for
/// each address that its application connects to, and one for each port that it receives connections on. A client that connects
/// to all pods, such as Prometheus, has one stream on each port for each pod.
const MAX_STREAMS_PER_CLIENT: usize = 32_768;
/// Number of streams per client that are always permitted, however little memory the process has. It is enough for a sidecar
/// whose application connects to some hundred addresses.
const MIN_STREAMS_PER_CLIENT: usize = 1_000;
/// Memory of a TLS connection without streams. Measured: 31 KiB, with 2000 connections.
const BYTES_PER_CONNECTION: usize = 32 << 10;
/// Mean age at which a connection is closed. It is short enough that a new replica soon gets its share of the clients, and long
/// enough that a proxy seldom opens its streams again.
pub(super) const CONNECTION_AGE: Duration = Duration::from_secs(30 * 60);
const CONNECTION_AGE_JITTER: f64 = 0.2;
