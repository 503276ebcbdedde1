//! Requests are distributed over replicas, fewer of them to slow ones.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tulle_tests::apps;
use tulle_tests::client::{Http1, full, request};
use tulle_tests::eventually::eventually;
use tulle_tests::load::load;
use tulle_tests::mesh::{HTTP, Mesh, mesh};

#[test]
fn round_robin_gives_every_replica_the_same_number_of_requests() {
    let mesh = mesh()
        .env("TULLE_PROXY_BALANCER", "round-robin")
        .workload("client")
        .replicas("web", 3);
    mesh.run(async |mesh: &Mesh| {
        for i in 0..3 {
            apps::start_echo(mesh, &format!("web-{i}")).await;
        }
        let mut client = Http1::handshake(mesh.dial("client", mesh.service_addr("web", HTTP)).await).await;
        let mut send_request = async || client.fetch(request("/")).await.unwrap().text();
        // A replica without a connection is skipped, so wait until all have one.
        let mut connected = BTreeSet::new();
        while connected.len() < 3 {
            connected.insert(send_request().await);
        }
        let mut answers: BTreeMap<String, usize> = BTreeMap::new();
        for _ in 0..30 {
            *answers.entry(send_request().await).or_default() += 1;
        }
        assert_eq!(answers.into_values().collect::<Vec<_>>(), [10, 10, 10]);
    });
}

#[test]
fn a_slow_replica_gets_fewer_requests() {
    mesh().workload("client").replicas("web", 3).run(async |mesh: &Mesh| {
        let mut apps = Vec::new();
        for (i, delay) in [(0, 100), (1, 0), (2, 0)] {
            let listener = mesh.listen(&format!("web-{i}"), HTTP).await;
            apps.push(apps::serve_http(listener, move |_| async move {
                tokio::time::sleep(Duration::from_millis(delay)).await;
                http::Response::new(full("ok"))
            }));
        }
        let total = async |workload: &str| {
            mesh.metric(workload, "request_total", &[r#"direction="inbound""#])
                .await
        };
        let enough = eventually("the replicas have several hundred requests", async || {
            (total("web-1").await > 300.).then_some(())
        });
        load(mesh, "client", mesh.service_addr("web", HTTP), 4, enough)
            .await
            .assert_all_ok();
        let (slow, fast) = (total("web-0").await, total("web-1").await + total("web-2").await);
        assert!(slow < fast / 10., "slow {slow}, fast {fast}");
    });
}

#[test]
fn a_replica_that_joins_gets_requests() {
    mesh().workload("client").replicas("web", 2).run(async |mesh: &Mesh| {
        for i in 0..2 {
            apps::start_echo(mesh, &format!("web-{i}")).await;
        }
        let dst = mesh.service_addr("web", HTTP);
        let pod = mesh.manifest("pod-web-1");
        mesh.remove("pod-web-1");
        let mut client = Http1::handshake(mesh.dial("client", dst).await).await;
        eventually("one replica gets all requests", async || {
            for _ in 0..20 {
                if client.fetch(request("/")).await.unwrap().text() != "web-0\n" {
                    return None;
                }
            }
            Some(())
        })
        .await;
        mesh.write("pod-web-1", &pod);
        eventually("the other replica gets requests again", async || {
            (client.fetch(request("/")).await.unwrap().text() == "web-1\n").then_some(())
        })
        .await;
    });
}
