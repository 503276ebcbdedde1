//! Admission of connections and requests of one direction: limits, memory pressure, and requests in flight.

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

/// The limits of one direction. A request is in flight until its response body is dropped, or until it fails or is
/// cancelled.
pub(crate) struct Admission {
    in_flight: AtomicUsize,
    max_in_flight: usize,
    connections: Arc<ConnectionLimiter>,
    memory_pressure: MemoryPressure,
    failures: Failures,
}

/// One request in flight.
pub(crate) struct InFlightSlot {
    admission: Arc<Admission>,
    /// Whether the outcome is counted. If it is not, drop counts [`Error::ClientClosed`].
    pub(in crate::http) is_recorded: bool,
}

impl Admission {
    pub(crate) fn new(
        max_in_flight: usize,
        connections: Arc<ConnectionLimiter>,
        memory_pressure: MemoryPressure,
        failures: Failures,
    ) -> Arc<Self> {
        Arc::new(Self {
            in_flight: AtomicUsize::new(0),
            max_in_flight,
            connections,
            memory_pressure,
            failures,
        })
    }

    /// Admits a connection, for which an evictable one may be closed. Returns `None` if the limit is reached;
    /// [`Self::connection_refusal`] then returns the error.
    pub(crate) fn admit_connection(&self, client: ClientAddr) -> Option<connections::ConnectionPermit> {
        self.connections.admit(client.0.ip())
    }

    /// Why an accepted connection must be refused; `None` if it is admitted.
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
    /// Records the end of the response body. A failure after the response head is counted only here.
    pub(crate) fn record_end(&mut self, result: Result<(), &Error>) {
        let was_recorded = std::mem::replace(&mut self.is_recorded, true);
        if let Err(error) = result
            && !was_recorded
        {
            self.admission.failures.count(error.cause());
        }
    }
}

/// Why a request is shed.
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
