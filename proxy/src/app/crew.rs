//! Which worker serves an accepted connection: the one that the kernel chose, unless another has clearly fewer.
//!
//! The kernel chooses by the connection's ports alone. Few connections that carry much, as sidecars have among each other,
//! would often end up with one worker while the others rest.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::{net::TcpStream, runtime::Handle};

use crate::net::{io::Tcp, listen::Client};

/// All workers, and how many connections each has of one listener.
pub(super) struct Crew(Vec<Member>);

struct Member {
    runtime: Handle,
    open: AtomicUsize,
}

/// A connection's place with its worker, until it is dropped.
pub(super) struct Seat {
    crew: Arc<Crew>,
    pub(super) worker: usize,
}

impl Crew {
    pub(super) fn new(runtimes: &[Handle]) -> Arc<Self> {
        let member = |runtime: &Handle| Member {
            runtime: runtime.clone(),
            open: AtomicUsize::new(0),
        };
        Arc::new(Self(runtimes.iter().map(member).collect()))
    }

    /// Seats a client that `worker` has accepted, and has the runtime there watch it.
    ///
    /// # Errors
    /// The process is short of what the system needs to watch a socket.
    pub(super) fn seat(self: &Arc<Self>, worker: usize, client: Client) -> io::Result<(Seat, Tcp)> {
        let seat = Seat {
            crew: self.clone(),
            worker: self.choose(worker),
        };
        let member = seat.member();
        member.open.fetch_add(1, Ordering::Relaxed);
        let _inside = member.runtime.enter();
        let stream = TcpStream::from_std(client.stream)?;
        Ok((seat, Tcp::with_prefix(stream, client.said)))
    }

    /// Another worker has to be woken, which a small difference does not repay.
    fn choose(&self, accepted_by: usize) -> usize {
        let open = |index: usize| self.0[index].open.load(Ordering::Relaxed);
        let own = open(accepted_by);
        let least = (0..self.0.len()).min_by_key(|&index| open(index));
        least.filter(|&index| own * 4 > open(index) * 5).unwrap_or(accepted_by)
    }
}

impl Seat {
    fn member(&self) -> &Member {
        &self.crew.0[self.worker]
    }

    /// The runtime of this seat's worker.
    pub(super) fn runtime(&self) -> &Handle {
        &self.member().runtime
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.member().open.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn connections_stay_where_they_are_unless_another_worker_has_clearly_fewer() {
        let crew = Crew::new(&[Handle::current(), Handle::current()]);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut seats = Vec::new();
        // All that the kernel gives to one worker is shared.
        for _ in 0..40 {
            let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let client = Client {
                stream: stream.into_std().unwrap(),
                said: Bytes::new(),
            };
            seats.push(crew.seat(0, client).unwrap().0);
        }
        let of_first = seats.iter().filter(|seat| seat.worker == 0).count();
        assert!((20..=23).contains(&of_first), "{of_first}");
        // Those that end make room.
        seats.retain(|seat| seat.worker == 0);
        assert_eq!(crew.choose(0), 1);
        assert_eq!(crew.choose(1), 1);
        seats.clear();
        assert_eq!(crew.choose(0), 0, "who has none serves what it accepts");
        assert_eq!(crew.choose(1), 1);
    }
}
