use std::net::Ipv4Addr;

use proptest::prelude::*;
use tokio::time::advance;

use super::*;
use crate::connections::shares::SMALL_SHARE;

fn ip(last: u8) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, last).into()
}

fn limiter(max: usize) -> Arc<ConnectionLimiter> {
    ConnectionLimiter::new("test", max, Within::Replace, &Registry::new())
}

fn is_closed(place: &Place) -> bool {
    place.connection.is_closed.load(Ordering::Relaxed)
}

#[test]
fn a_newcomer_takes_a_place_of_the_address_that_has_the_most() {
    let limiter = limiter(7);
    let alone = limiter.admit(ip(1)).unwrap();
    let many = [(); 6].map(|()| limiter.admit(ip(2)).unwrap());
    let _newcomer = limiter.admit(ip(3)).unwrap();
    assert!(
        !is_closed(&alone),
        "it has been silent for longer, but has one place only"
    );
    assert_eq!([true, false, false], [0, 1, 2].map(|i| is_closed(&many[i])));
    assert_eq!(limiter.n(), 7);
}

#[test]
fn where_each_of_many_has_one_who_has_two_loses_one_that_is_not_in_use() {
    let limiter = limiter(8);
    let others: Vec<_> = (1..8).map(|n| limiter.admit(ip(n)).unwrap()).collect();
    let [first, second] = [(); 2].map(|()| limiter.admit(ip(9)).unwrap());
    assert!(
        is_closed(&others[0]),
        "each had one, and this was silent for the longest"
    );
    let _newcomer = limiter.admit(ip(10)).unwrap();
    assert!(is_closed(&first) && !is_closed(&second));
    let third = limiter.admit(ip(9)).unwrap();
    let closed: Vec<_> = others.iter().map(is_closed).collect();
    assert_eq!(closed[..3], [true, true, false], "each had one again");
    second.mark();
    third.mark();
    let _newcomer = limiter.admit(ip(11)).unwrap();
    assert!(!is_closed(&second) && !is_closed(&third), "both were in use");
    assert!(is_closed(&others[2]));
}

#[tokio::test(start_paused = true)]
async fn of_those_with_one_the_silent_go_before_those_that_were_used() {
    let limiter = limiter(8);
    let places: Vec<_> = (1..9).map(|n| limiter.admit(ip(n)).unwrap()).collect();
    places[..6].iter().for_each(|place| place.activity().mark());
    advance(Duration::from_secs(2)).await;
    // Those that were used are found quiet at the second look.
    let newcomers: Vec<_> = (11..16).map(|n| limiter.admit(ip(n)).unwrap()).collect();
    assert!(is_closed(&places[6]) && is_closed(&places[7]));
    let closed = places[..6].iter().filter(|place| is_closed(place)).count();
    assert_eq!(closed, 1, "those that came last are the most silent ones");
    assert_eq!(newcomers.iter().filter(|place| is_closed(place)).count(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_has_just_come_is_given_time_to_speak() {
    let limiter = limiter(8);
    let flood: Vec<_> = (1..8).map(|n| limiter.admit(ip(n)).unwrap()).collect();
    flood.iter().for_each(|place| place.activity().mark());
    let newcomer = limiter.admit(ip(20)).unwrap();
    let more: Vec<_> = (31..38)
        .map(|n| {
            let place = limiter.admit(ip(n)).unwrap();
            place.activity().mark();
            place
        })
        .collect();
    assert!(!is_closed(&newcomer), "others were active, and go nevertheless");
    assert!(flood.iter().all(is_closed));
    advance(Duration::from_secs(2)).await;
    let _last = limiter.admit(ip(40)).unwrap();
    assert!(is_closed(&newcomer) && !more.iter().any(is_closed));
}

#[test]
fn a_client_with_one_connection_outlasts_a_flood_of_addresses_with_two() {
    for is_in_use in [false, true] {
        let limiter = ConnectionLimiter::new("test", 30, Within::Keep, &Registry::new());
        let mut flood = Vec::new();
        let mut attack = |n: u8| {
            if let Some(place) = limiter.admit(ip(n)) {
                if is_in_use {
                    place.activity().mark();
                }
                flood.push(place);
            }
        };
        (0..40).for_each(|n| attack(100 + n % 20));
        let good = limiter.admit(ip(1)).unwrap();
        (0..400).for_each(|n| attack(100 + (n % 20) as u8));
        assert!(!is_closed(&good), "in use: {is_in_use}");
    }
}

#[test]
fn of_an_address_the_connection_goes_that_has_been_silent_for_the_longest() {
    let limiter = limiter(3);
    let places = [(); 3].map(|()| limiter.admit(ip(1)).unwrap());
    places[0].activity().mark();
    let _newer = limiter.admit(ip(1)).unwrap();
    assert_eq!([false, true, false], [0, 1, 2].map(|i| is_closed(&places[i])));
    places[2].activity().mark();
    places[0].activity().mark();
    let _newest = limiter.admit(ip(1)).unwrap();
    let closed = [0, 1, 2].map(|i| is_closed(&places[i]));
    assert_eq!([false, true, false], closed, "the one that came in between was silent");
}

#[test]
fn a_client_keeps_the_connections_that_it_uses_and_shares_with_others() {
    let limiter = ConnectionLimiter::new("test", 6, Within::Keep, &Registry::new());
    let [used, ..] = &[(); 4].map(|()| {
        let place = limiter.admit(ip(1)).unwrap();
        place.activity().mark();
        place
    });
    let silent = limiter.admit(ip(1)).unwrap();
    let used_too = limiter.admit(ip(1)).unwrap();
    used_too.activity().mark();
    let newcomer = limiter.admit(ip(1)).unwrap();
    assert_eq!([used, &silent, &used_too].map(is_closed), [false, true, false]);
    newcomer.activity().mark();
    assert!(limiter.admit(ip(1)).is_none());
    let other = limiter.admit(ip(2)).unwrap();
    assert_eq!(limiter.n(), 6, "one of them is closed for another client");
    assert!(!is_closed(&other));
}

#[test]
fn peers_with_an_identity_keep_three_quarters_while_strangers_have_any() {
    let limiter = limiter(8);
    let peers = [1, 2, 3, 4, 5, 6].map(|n| {
        let place = limiter.admit(ip(n)).unwrap();
        place.verified("web");
        place
    });
    let strangers: Vec<_> = (10..40).map(|n| limiter.admit(ip(n)).unwrap()).collect();
    assert_eq!(strangers.iter().filter(|place| !is_closed(place)).count(), 2);
    assert!(!peers.iter().any(is_closed));
}

#[test]
fn where_all_have_proven_an_identity_an_address_that_has_several_loses_one() {
    let limiter = limiter(3);
    let verified = |n| {
        let place = limiter.admit(ip(n)).unwrap();
        place.verified("web");
        place
    };
    let peers = [verified(1), verified(1), verified(3)];
    let _other = verified(4);
    assert_eq!(peers.each_ref().map(is_closed), [true, false, false]);
    assert!(limiter.admit(ip(5)).is_none(), "each of them has one");
    drop(peers);
    assert!(limiter.admit(ip(5)).is_some());
}

#[test]
fn neither_an_identity_nor_one_of_its_addresses_takes_what_others_need() {
    for addresses in [1, 100] {
        let limiter = limiter(100);
        let newcomer = |client: u8, identity: &str| {
            // Others come while it proves who it is.
            let place = limiter.admit(ip(client)).unwrap();
            let meanwhile: Vec<_> = (0..10)
                .map(|n| limiter.admit(ip(100 + n % addresses)).unwrap())
                .collect();
            meanwhile.iter().for_each(|place| place.verified("attacker"));
            assert!(!is_closed(&place), "{client}");
            place.verified(identity);
            (place, meanwhile)
        };
        let attack: Vec<_> = (0..200)
            .map(|n| {
                let place = limiter.admit(ip(100 + n % addresses)).unwrap();
                place.verified("attacker");
                place
            })
            .collect();
        let others: Vec<_> = (1..31).map(|n| newcomer(n, &format!("workload-{n}"))).collect();
        let lost = others.iter().filter(|(place, _)| is_closed(place)).count();
        assert_eq!(lost, 0, "{addresses}");
        drop(attack);
    }
}

#[test]
fn pods_at_the_address_of_their_node_are_told_apart_by_their_identity() {
    let limiter = limiter(12);
    let admit = |identity: &str| {
        let place = limiter.admit(ip(1)).unwrap();
        place.verified(identity);
        place
    };
    let quiet = admit("quiet");
    let busy: Vec<_> = (0..11).map(|_| admit("busy")).collect();
    let _newcomer = admit("other");
    assert!(!is_closed(&quiet) && is_closed(&busy[0]));
}

#[test]
fn a_global_network_has_a_quarter_of_the_places_where_there_are_too_few() {
    let v6 = |network: u16, host: u16| IpAddr::from([0x2001, 0xdb8, 0, network, 0, 0, 0, host]);
    let limiter = limiter(40);
    let others: Vec<_> = (0..30).map(|n| limiter.admit(v6(n, 1)).unwrap()).collect();
    let attack: Vec<_> = (0..200).map(|n| limiter.admit(v6(100, n)).unwrap()).collect();
    assert!(!others.iter().any(is_closed));
    assert_eq!(attack.iter().filter(|place| !is_closed(place)).count(), 10);
}

#[test]
fn machines_of_a_private_network_are_clients_each_and_those_of_a_global_one_are_one() {
    let v6 = |text: &str| network(text.parse().unwrap());
    assert_eq!(v6("2001:db8::1:0:0:0:1"), v6("2001:db8::1:ffff:0:0:2"));
    assert_ne!(v6("2001:db8:0:1::1"), v6("2001:db8:0:2::1"));
    assert_ne!(v6("fd00::1:0:0:0:1"), v6("fd00::1:ffff:0:0:2"));
    assert_ne!(v6("fe80::1"), v6("fe80::2"));
    assert_eq!(v6("::ffff:10.0.0.1"), ip(1));
    assert_ne!(v6("::1"), v6("::2"));
}

#[tokio::test]
async fn a_connection_that_loses_its_place_ends_whenever_its_task_is_named() {
    let limiter = limiter(1);
    for is_named_late in [false, true] {
        let place = limiter.admit(ip(1)).unwrap();
        let activity = place.activity();
        let task = tokio::spawn(async move {
            let _place = place;
            std::future::pending::<()>().await;
        });
        let mut newcomer = None;
        if is_named_late {
            newcomer = limiter.admit(ip(2));
        }
        activity.served_by(task.abort_handle());
        newcomer.get_or_insert_with(|| limiter.admit(ip(2)).unwrap());
        assert!(task.await.unwrap_err().is_cancelled());
        assert_eq!(limiter.n(), 1);
    }
}

proptest! {
    /// Whatever comes and goes: no more places than there are, and while somebody has more than a share, nobody else loses one.
    #[test]
    fn places_are_bounded_and_shared_fairly(clients in proptest::collection::vec((0_u8..4, any::<bool>()), 1..200)) {
        const PLACES: usize = 24;
        let limiter = limiter(PLACES);
        let mut held: Vec<(u8, Place)> = Vec::new();
        for (client, leaves) in clients {
            if leaves && !held.is_empty() {
                held.remove(usize::from(client) % held.len());
            }
            let count = |client| held.iter().filter(|(of, _)| *of == client).count();
            let counts = [0, 1, 2, 3].map(count);
            let n_clients = (0..4).filter(|of| *of == client || counts[usize::from(*of)] > 0).count();
            let (most, share) = (counts.into_iter().max().unwrap(), PLACES.div_ceil(n_clients).max(SMALL_SHARE));
            held.push((client, limiter.admit(ip(client)).unwrap()));
            held.retain(|(of, place)| {
                let is_fair = most <= share || counts[usize::from(*of)] == most;
                assert!(!is_closed(place) || is_fair, "{counts:?} lost one of {of}");
                !is_closed(place)
            });
            prop_assert_eq!(limiter.n(), held.len());
            prop_assert!(held.len() <= PLACES);
        }
    }
}
