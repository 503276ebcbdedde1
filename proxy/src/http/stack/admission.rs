//! Admission of connections and requests: the limits of one direction, and the requests in flight.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use tulle_core::{
    addr::ClientAddr,
    connections::{self, ConnectionLimiter},
};

use crate::{
    http::error::Error,
    metrics::failures::Failures,
    net::{io::Tcp, memory::MemoryPressure},
};

/// Requests in flight in one direction, to the end of their responses, and connections that clients have open.
pub(crate) struct Admission {
    in_flight: AtomicUsize,
    max_in_flight: usize,
    connections: Arc<ConnectionLimiter>,
    memory_pressure: MemoryPressure,
    failures: Failures,
}

/// A place among the requests in flight.
pub(crate) struct InFlightSlot {
    admission: Arc<Admission>,
    /// Whether it is known what has become of the request; otherwise its client has left.
    pub(in crate::http) is_recorded: bool,
}

impl Admission {
    pub(crate) fn new(
        max_in_flight: usize,
        connections: Arc<ConnectionLimiter>,
        shortage: MemoryPressure,
        failures: Failures,
    ) -> Arc<Self> {
        Arc::new(Self {
            in_flight: AtomicUsize::new(0),
            max_in_flight,
            connections,
            memory_pressure: shortage,
            failures,
        })
    }

    /// A place for a connection, for which another one may be closed; where there is none, [`Self::refusal`] says so.
    pub(crate) fn admit_connection(&self, client: ClientAddr) -> Option<connections::ConnectionPermit> {
        self.connections.admit(client.0.ip())
    }

    /// Why a connection that has just been accepted is turned away, if it is.
    pub(crate) fn connection_refusal(&self, accepted: &Tcp) -> Option<Error> {
        if self.memory_pressure.is_active() {
            return Some(Error::MemoryPressure);
        }
        let limit = self.connections.max();
        (!accepted.has_permit()).then_some(Error::TooManyConnections { limit })
    }

    pub(in crate::http) fn admit_request(self: &Arc<Self>) -> Result<InFlightSlot, ShedReason> {
        if self.memory_pressure.is_active() {
            return Err(ShedReason::MemoryPressure);
        }
        let mut slot = InFlightSlot {
            admission: self.clone(),
            is_recorded: false,
        };
        if self.in_flight.fetch_add(1, Ordering::Relaxed) >= self.max_in_flight {
            slot.is_recorded = true;
            Err(ShedReason::MaxInFlight)
        } else {
            Ok(slot)
        }
    }
}

impl InFlightSlot {
    /// The response is complete, or failed after its head, which nobody else counts.
    pub(crate) fn record_end(&mut self, result: Result<(), &Error>) {
        if let (Err(error), false) = (result, std::mem::replace(&mut self.is_recorded, true)) {
            self.admission.failures.count(error.cause());
        }
    }
}

/// Of what there is no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::http) enum ShedReason {
    MaxInFlight,
    MemoryPressure,
}

impl Drop for InFlightSlot {
    fn drop(&mut self) {
        self.admission.in_flight.fetch_sub(1, Ordering::Relaxed);
        if !self.is_recorded {
            self.admission.failures.count(Error::ClientClosed.cause());
        }
    }
}
