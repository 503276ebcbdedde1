//! What goes in comes out: HTTP of every version and bytes, as if there were no proxies.

use tulle_tests::apps;
use tulle_tests::client::{Http1, Http2, request, request2};
use tulle_tests::mesh::{HTTP, Mesh, mesh};

/// A client and an echo server, both meshed.
fn pair(test: impl AsyncFnOnce(&Mesh) + Send) {
    mesh().workload("client").workload("web").run(async |mesh: &Mesh| {
        apps::echo(mesh, "web").await;
        test(mesh).await;
    });
}

#[test]
fn http1_requests_pass_on_a_kept_connection() {
    pair(async |mesh: &Mesh| {
        let mut client = Http1::over(mesh.dial("client", mesh.service("web", HTTP)).await).await;
        for _ in 0..10 {
            let answer = client.ask(request("/")).await.unwrap();
            assert_eq!((answer.status.as_u16(), answer.text().as_str()), (200, "web\n"));
            assert_eq!(answer.version, http::Version::HTTP_11);
        }
    });
}

#[test]
fn http2_requests_pass_on_one_connection() {
    pair(async |mesh: &Mesh| {
        let mut client = Http2::over(mesh.dial("client", mesh.service("web", HTTP)).await).await;
        for _ in 0..10 {
            let answer = client.ask(request2("/")).await.unwrap();
            assert_eq!((answer.status.as_u16(), answer.text().as_str()), (200, "web\n"));
        }
    });
}
