//! What takes more than there is finds an end, and everybody else goes on.

use tokio::io::AsyncReadExt as _;
use tulle_tests::apps;
use tulle_tests::client::{Http1, request};
use tulle_tests::eventually::eventually;
use tulle_tests::mesh::{HTTP, Mesh, TCP, mesh};

#[test]
fn a_proxy_short_of_memory_refuses_and_says_so_until_there_is_some_again() {
    const LIMIT: usize = 600 << 20; // all proxies of a test are one process
    mesh()
        .workload("client")
        .its_env("TULLE_PROXY_MEMORY_LIMIT", &LIMIT.to_string())
        .workload("web")
        .run(async |mesh: &Mesh| {
            apps::echo(mesh, "web").await;
            let mut client = Http1::over(mesh.dial("client", mesh.service("web", HTTP)).await).await;
            assert_eq!(client.ask(request("/")).await.unwrap().status, 200);
            let hog = vec![1_u8; LIMIT];
            eventually("memory is short", async || {
                (mesh.metric("client", "tulle_memory_short", &[]).await >= 1.0).then_some(())
            })
            .await;
            let answer = client.ask(request("/")).await.unwrap();
            assert_eq!((answer.status.as_u16(), answer.cause()), (503, "memory-short"));
            let mut stream = mesh.dial("client", mesh.service("web", TCP)).await;
            assert!(matches!(stream.read(&mut [0]).await, Ok(0) | Err(_)), "it is closed");
            drop(hog);
            eventually("there is memory again", async || {
                (mesh.metric("client", "tulle_memory_short", &[]).await < 1.0).then_some(())
            })
            .await;
            assert_eq!(mesh.get("client", mesh.service("web", HTTP), "/").await.status, 200);
            let short = ["cause=\"memory-short\""];
            assert_eq!(mesh.metric("client", "tulle_failures_total", &short).await, 2.0);
        });
}
