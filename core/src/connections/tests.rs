use std::net::Ipv4Addr;

use proptest::prelude::*;
use tokio::time::advance;

use super::*;
use crate::connections::eviction::MIN_CONNECTIONS_PER_CLIENT;

fn ip(last: u8) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, last).into()
}

fn limiter(max: usize) -> Arc<ConnectionLimiter> {
    ConnectionLimiter::new("test", max, SameAddressEviction::Idlest, &Registry::new())
}

fn is_evicted(permit: &ConnectionPermit) -> bool {
    permit.connection.is_evicted.load(Ordering::Relaxed)
}

#[test]
fn a_new_client_evicts_from_the_address_with_most_connections() {
    let limiter = limiter(7);
    let alone = limiter.admit(ip(1)).unwrap();
    let many = [(); 6].map(|()| limiter.admit(ip(2)).unwrap());
    let _newcomer = limiter.admit(ip(3)).unwrap();
    assert!(
        !is_evicted(&alone),
        "the connection of a client with one connection stays, although it has been unused for longer"
    );
    assert_eq!([true, false, false], [0, 1, 2].map(|i| is_evicted(&many[i])));
    assert_eq!(limiter.n_connections(), 7);
}

#[test]
fn a_client_with_two_connections_loses_an_unused_one() {
    let limiter = limiter(8);
    let others: Vec<_> = (1..8).map(|n| limiter.admit(ip(n)).unwrap()).collect();
    let [first, second] = [(); 2].map(|()| limiter.admit(ip(9)).unwrap());
    assert!(
        is_evicted(&others[0]),
        "each client had one connection, and this one was unused for the longest time"
    );
    let _newcomer = limiter.admit(ip(10)).unwrap();
    assert!(is_evicted(&first) && !is_evicted(&second));
    let third = limiter.admit(ip(9)).unwrap();
    let closed: Vec<_> = others.iter().map(is_evicted).collect();
    assert_eq!(
        closed[..3],
        [true, true, false],
        "each client had one connection, and the second was unused for the longest time"
    );
    second.record_activity();
    third.record_activity();
    let _newcomer = limiter.admit(ip(11)).unwrap();
    assert!(!is_evicted(&second) && !is_evicted(&third), "both were in use");
    assert!(is_evicted(&others[2]));
}

#[tokio::test(start_paused = true)]
async fn unused_connections_are_evicted_before_used_ones() {
    let limiter = limiter(8);
    let permits: Vec<_> = (1..9).map(|n| limiter.admit(ip(n)).unwrap()).collect();
    permits[..6].iter().for_each(|permit| permit.record_activity());
    advance(Duration::from_secs(2)).await;
    // The second activity check finds the used ones idle.
    let new_clients: Vec<_> = (11..16).map(|n| limiter.admit(ip(n)).unwrap()).collect();
    assert!(is_evicted(&permits[6]) && is_evicted(&permits[7]));
    let closed = permits[..6].iter().filter(|permit| is_evicted(permit)).count();
    assert_eq!(closed, 1, "one used connection is evicted, then unused new ones");
    assert_eq!(new_clients.iter().filter(|permit| is_evicted(permit)).count(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_new_client_gets_time_to_send_its_first_byte() {
    let limiter = limiter(8);
    let flood: Vec<_> = (1..8).map(|n| limiter.admit(ip(n)).unwrap()).collect();
    flood.iter().for_each(|permit| permit.record_activity());
    let new_client = limiter.admit(ip(20)).unwrap();
    let more: Vec<_> = (31..38)
        .map(|n| {
            let permit = limiter.admit(ip(n)).unwrap();
            permit.record_activity();
            permit
        })
        .collect();
    assert!(
        !is_evicted(&new_client),
        "the others were active and are evicted nevertheless"
    );
    assert!(flood.iter().all(is_evicted));
    advance(Duration::from_secs(2)).await;
    let _last = limiter.admit(ip(40)).unwrap();
    assert!(is_evicted(&new_client) && !more.iter().any(is_evicted));
}

#[test]
fn a_client_with_one_connection_outlasts_a_flood_of_addresses_with_two() {
    for is_in_use in [false, true] {
        let limiter = ConnectionLimiter::new("test", 30, SameAddressEviction::UnusedOnly, &Registry::new());
        let mut flood = Vec::new();
        let mut attack = |n: u8| {
            if let Some(permit) = limiter.admit(ip(n)) {
                if is_in_use {
                    permit.record_activity();
                }
                flood.push(permit);
            }
        };
        (0..40).for_each(|n| attack(100 + n % 20));
        let good = limiter.admit(ip(1)).unwrap();
        (0..400).for_each(|n| attack(100 + (n % 20) as u8));
        assert!(!is_evicted(&good), "in use: {is_in_use}");
    }
}

#[tokio::test(start_paused = true)]
async fn clients_with_equal_counts_are_checked_in_turn() {
    // Rule 3 checks 64 connections in one pass, and each of these clients has two. Clients are checked in descending order, so the
    // unused connections of the lowest address are reached only by the third eviction.
    const N_CLIENTS: u8 = 67;
    let limiter = limiter(2 * usize::from(N_CLIENTS));
    let permits: Vec<_> = (0..2 * N_CLIENTS)
        .map(|n| limiter.admit(ip(n % N_CLIENTS)).unwrap())
        .collect();
    let (unused, used): (Vec<_>, Vec<_>) = permits.iter().partition(|permit| permit.connection.ip == ip(0));
    let mut new_clients = Vec::new();
    let closed = [200, 201, 202].map(|n| {
        used.iter().for_each(|permit| permit.record_activity());
        new_clients.push(limiter.admit(ip(n)).unwrap());
        unused.iter().any(|permit| is_evicted(permit))
    });
    assert_eq!(closed, [false, false, true]);
}

#[test]
fn a_client_with_an_active_and_an_unused_connection_loses_the_unused_one() {
    let limiter = limiter(8);
    let others: Vec<_> = (1..7).map(|n| limiter.admit(ip(n)).unwrap()).collect();
    let [active, unused] = [(); 2].map(|()| limiter.admit(ip(9)).unwrap());
    others
        .iter()
        .chain([&active])
        .for_each(|permit| permit.record_activity());
    let _newcomer = limiter.admit(ip(10)).unwrap();
    assert!(
        !others.iter().any(is_evicted),
        "each of these clients has one connection only"
    );
    assert_eq!([&active, &unused].map(is_evicted), [false, true]);
}

#[tokio::test(start_paused = true)]
async fn one_eviction_checks_a_bounded_number_of_connections() {
    let limiter = limiter(201);
    let used: Vec<_> = (0..200).map(|n| limiter.admit(ip(n)).unwrap()).collect();
    used.iter().for_each(|permit| permit.record_activity());
    let unused = limiter.admit(ip(200)).unwrap();
    advance(Duration::from_secs(2)).await;
    // The search for an unused connection checks the 64 oldest and the 64 newest.
    let _new_client = limiter.admit(ip(201)).unwrap();
    assert!(is_evicted(&unused));
    assert!(used.iter().all(|permit| !is_evicted(permit)), "connections in use stay");
}

#[tokio::test(start_paused = true)]
async fn an_unused_connection_behind_many_used_ones_is_replaced() {
    let limiter = ConnectionLimiter::new("test", 400, SameAddressEviction::UnusedOnly, &Registry::new());
    let admit_used = || limiter.admit(ip(1)).inspect(|permit| permit.record_activity());
    // As many as one client may have.
    let mut used: Vec<_> = std::iter::from_fn(admit_used).collect();
    assert!(used.len() > 128, "{}", used.len());
    used.pop();
    let unused = limiter.admit(ip(1)).unwrap();
    advance(Duration::from_secs(2)).await;
    let newest = limiter.admit(ip(1));
    assert!(newest.is_some() && is_evicted(&unused));
    assert!(used.iter().all(|permit| !is_evicted(permit)));
}

#[test]
fn the_oldest_unused_connection_of_an_address_is_evicted() {
    let limiter = limiter(3);
    let permits = [(); 3].map(|()| limiter.admit(ip(1)).unwrap());
    permits[0].record_activity();
    let _newer = limiter.admit(ip(1)).unwrap();
    assert_eq!([false, true, false], [0, 1, 2].map(|i| is_evicted(&permits[i])));
    permits[2].record_activity();
    permits[0].record_activity();
    let _newest = limiter.admit(ip(1)).unwrap();
    let closed = [0, 1, 2].map(|i| is_evicted(&permits[i]));
    assert_eq!([false, true, false], closed, "the used ones stay");
}

#[test]
fn a_client_keeps_its_used_connections_unless_another_client_needs_one() {
    let limiter = ConnectionLimiter::new("test", 6, SameAddressEviction::UnusedOnly, &Registry::new());
    let [used, ..] = &[(); 4].map(|()| {
        let permit = limiter.admit(ip(1)).unwrap();
        permit.record_activity();
        permit
    });
    let silent = limiter.admit(ip(1)).unwrap();
    let used_too = limiter.admit(ip(1)).unwrap();
    used_too.record_activity();
    let newest = limiter.admit(ip(1)).unwrap();
    assert_eq!([used, &silent, &used_too].map(is_evicted), [false, true, false]);
    newest.record_activity();
    assert!(limiter.admit(ip(1)).is_none());
    let other = limiter.admit(ip(2)).unwrap();
    assert_eq!(limiter.n_connections(), 6, "one of them is closed for the new client");
    assert!(!is_evicted(&other));
}

#[test]
fn peers_with_an_identity_keep_three_quarters_while_there_are_unverified_clients() {
    let limiter = limiter(8);
    let peers = [1, 2, 3, 4, 5, 6].map(|n| {
        let permit = limiter.admit(ip(n)).unwrap();
        permit.set_identity("web");
        permit
    });
    let unverified: Vec<_> = (10..40).map(|n| limiter.admit(ip(n)).unwrap()).collect();
    assert_eq!(unverified.iter().filter(|permit| !is_evicted(permit)).count(), 2);
    assert!(!peers.iter().any(is_evicted));
}

#[test]
fn if_all_peers_are_verified_an_address_with_several_connections_loses_one() {
    let limiter = limiter(3);
    let verified = |n| {
        let permit = limiter.admit(ip(n)).unwrap();
        permit.set_identity("web");
        permit
    };
    let peers = [verified(1), verified(1), verified(3)];
    let _other = verified(4);
    assert_eq!(peers.each_ref().map(is_evicted), [true, false, false]);
    assert!(limiter.admit(ip(5)).is_none(), "each client has one");
    drop(peers);
    assert!(limiter.admit(ip(5)).is_some());
}

#[test]
fn neither_an_identity_nor_one_of_its_addresses_starves_others() {
    for addresses in [1, 100] {
        let limiter = limiter(100);
        let new_client = |client: u8, identity: &str| {
            // Other clients connect while the handshake of this one is running.
            let permit = limiter.admit(ip(client)).unwrap();
            let meanwhile: Vec<_> = (0..10)
                .map(|n| limiter.admit(ip(100 + n % addresses)).unwrap())
                .collect();
            meanwhile.iter().for_each(|permit| permit.set_identity("attacker"));
            assert!(!is_evicted(&permit), "{client}");
            permit.set_identity(identity);
            (permit, meanwhile)
        };
        let attack: Vec<_> = (0..200)
            .map(|n| {
                let permit = limiter.admit(ip(100 + n % addresses)).unwrap();
                permit.set_identity("attacker");
                permit
            })
            .collect();
        let others: Vec<_> = (1..31).map(|n| new_client(n, &format!("workload-{n}"))).collect();
        let lost = others.iter().filter(|(permit, _)| is_evicted(permit)).count();
        assert_eq!(lost, 0, "{addresses}");
        drop(attack);
    }
}

#[test]
fn pods_that_share_an_address_are_distinguished_by_their_identity() {
    let limiter = limiter(12);
    let admit = |identity: &str| {
        let permit = limiter.admit(ip(1)).unwrap();
        permit.set_identity(identity);
        permit
    };
    let quiet = admit("quiet");
    let busy: Vec<_> = (0..11).map(|_| admit("busy")).collect();
    let _newcomer = admit("other");
    assert!(!is_evicted(&quiet) && is_evicted(&busy[0]));
}

#[test]
fn a_global_network_holds_at_most_a_quarter_of_a_full_limit() {
    let v6 = |network: u16, host: u16| IpAddr::from([0x2001, 0xdb8, 0, network, 0, 0, 0, host]);
    let limiter = limiter(40);
    let others: Vec<_> = (0..30).map(|n| limiter.admit(v6(n, 1)).unwrap()).collect();
    let attack: Vec<_> = (0..200).map(|n| limiter.admit(v6(100, n)).unwrap()).collect();
    assert!(!others.iter().any(is_evicted));
    assert_eq!(attack.iter().filter(|permit| !is_evicted(permit)).count(), 10);
}

#[test]
fn each_private_address_is_a_client_and_each_global_slash_64_is_one() {
    let v6 = |text: &str| client_network(text.parse().unwrap());
    assert_eq!(v6("2001:db8::1:0:0:0:1"), v6("2001:db8::1:ffff:0:0:2"));
    assert_ne!(v6("2001:db8:0:1::1"), v6("2001:db8:0:2::1"));
    assert_ne!(v6("fd00::1:0:0:0:1"), v6("fd00::1:ffff:0:0:2"));
    assert_ne!(v6("fe80::1"), v6("fe80::2"));
    assert_eq!(v6("::ffff:10.0.0.1"), ip(1));
    assert_ne!(v6("::1"), v6("::2"));
}

#[tokio::test]
async fn an_evicted_connection_ends_even_if_its_task_is_set_later() {
    let limiter = limiter(1);
    for is_set_late in [false, true] {
        let permit = limiter.admit(ip(1)).unwrap();
        let handle = permit.handle();
        let task = tokio::spawn(async move {
            let _permit = permit;
            std::future::pending::<()>().await;
        });
        let mut new_client = None;
        if is_set_late {
            new_client = limiter.admit(ip(2));
        }
        handle.set_task(task.abort_handle());
        new_client.get_or_insert_with(|| limiter.admit(ip(2)).unwrap());
        assert!(task.await.unwrap_err().is_cancelled());
        assert_eq!(limiter.n_connections(), 1);
    }
}

proptest! {
    /// There are never more connections than the limit. While a client exceeds its share, no other client loses a
    /// connection.
    #[test]
    fn permits_are_bounded_and_shared_fairly(clients in proptest::collection::vec((0_u8..4, any::<bool>()), 1..200)) {
        const MAX: usize = 24;
        let limiter = limiter(MAX);
        let mut held: Vec<(u8, ConnectionPermit)> = Vec::new();
        for (client, closes_one_first) in clients {
            if closes_one_first && !held.is_empty() {
                held.remove(usize::from(client) % held.len());
            }
            let count = |client| held.iter().filter(|(owner, _)| *owner == client).count();
            let counts = [0, 1, 2, 3].map(count);
            let n_clients = (0..4).filter(|owner| *owner == client || counts[usize::from(*owner)] > 0).count();
            let (most, share) = (counts.into_iter().max().unwrap(), MAX.div_ceil(n_clients).max(MIN_CONNECTIONS_PER_CLIENT));
            held.push((client, limiter.admit(ip(client)).unwrap()));
            held.retain(|(owner, permit)| {
                let may_lose_one = most <= share || counts[usize::from(*owner)] == most;
                assert!(!is_evicted(permit) || may_lose_one, "{counts:?}: client {owner} lost one");
                !is_evicted(permit)
            });
            prop_assert_eq!(limiter.n_connections(), held.len());
            prop_assert!(held.len() <= MAX);
        }
    }
}
