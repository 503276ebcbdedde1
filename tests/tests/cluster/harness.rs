//! The test cluster itself: pods on two nodes reach each other, kubectl works, and no leftovers remain.

use std::fs;
use std::path::Path;

use anyhow::Context as _;
use serde_json::{Value, json};
use tulle_tests::cluster::{Cluster, ClusterOptions};
use tulle_tests::images::Image;

/// An echo server on one node, with a Service of the same name.
fn workload(node: &str) -> Value {
    let labels = json!({"app": node});
    json!({
        "apiVersion": "v1",
        "kind": "List",
        "items": [
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": node, "labels": labels},
                "spec": {
                    "nodeName": node,
                    "terminationGracePeriodSeconds": 1,
                    "containers": [{
                        "name": "serve",
                        "image": Image::Workload.reference(),
                        "imagePullPolicy": "Never",
                        "args": ["serve", "--http", "0.0.0.0:8080", "--name", node],
                        "readinessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 1},
                    }],
                },
            },
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": node},
                "spec": {"selector": labels, "ports": [{"port": 80, "targetPort": 8080}]},
            },
        ],
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_on_two_nodes_reach_each_other_by_name_and_no_leftovers_remain() {
    let options = ClusterOptions {
        nodes: 2,
        images: vec![Image::Workload],
        ..ClusterOptions::default()
    };
    let cluster = Cluster::start_with(options).await.unwrap();
    for node in ["node1", "node2"] {
        let manifest = cluster.dir().join(format!("{node}-workload.json"));
        fs::write(&manifest, workload(node).to_string()).unwrap();
        cluster
            .kubectl(&["apply", "-f", manifest.to_str().unwrap()])
            .await
            .unwrap();
    }
    cluster
        .kubectl(&[
            "wait",
            "pod",
            "node1",
            "node2",
            "--for=condition=Ready",
            "--timeout=60s",
        ])
        .await
        .unwrap();

    for (from, to) in [("node1", "node2"), ("node2", "node1")] {
        let url = format!("http://{to}/");
        let answered = async || {
            let got = cluster
                .kubectl(&["exec", from, "--", "curl", "-sSf", "-m", "2", &url])
                .await;
            got.map(drop).with_context(|| format!("{to} from {from}"))
        };
        cluster.wait_until("the other node responds", answered).await.unwrap();
    }
    let log = cluster.kubectl(&["logs", "node1"]).await.unwrap();
    assert!(log.contains("8080"), "{log}");
    let zones = cluster
        .kubectl(&[
            "get",
            "nodes",
            "-o",
            r"jsonpath={.items[*].metadata.labels.topology\.kubernetes\.io/zone}",
        ])
        .await
        .unwrap();
    assert_eq!(zones, "zone-1 zone-2");

    let dir = cluster.dir().to_owned();
    let begun = tokio::time::Instant::now();
    drop(cluster);
    eprintln!("ended within {:?}", begun.elapsed());
    assert!(!dir.exists());
    assert_eq!(find_leftovers(&dir), Vec::<String>::new());
}

/// Processes, mounts, network namespaces and cgroups of the cluster that are left.
fn find_leftovers(dir: &Path) -> Vec<String> {
    let name = dir.file_name().unwrap().to_str().unwrap();
    let read = |path: &Path| fs::read_to_string(path).unwrap_or_default();
    let list = |dir: &str| {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect::<Vec<_>>()
    };
    let processes = list("/proc").into_iter().filter(|path| {
        // A zombie, which init has yet to reap, has no working directory.
        fs::read_link(path.join("cwd")).is_ok()
            && (read(&path.join("cmdline")).contains(dir.to_str().unwrap())
                || read(&path.join("cgroup")).contains(name))
    });
    let namespaces = list("/run/netns").into_iter();
    let groups = list("/sys/fs/cgroup")
        .into_iter()
        .flat_map(|dir| list(dir.to_str().unwrap()));
    let cni_results = list("/var/lib/cni/results").into_iter();
    let named = namespaces
        .chain(groups)
        .chain(cni_results)
        .filter(|path| path.to_string_lossy().contains(name));
    let mounts = read(Path::new("/proc/self/mounts"));
    let mounts = mounts.lines().filter(|line| line.contains(name)).map(str::to_owned);
    processes
        .chain(named)
        .map(|path| path.display().to_string())
        .chain(mounts)
        .collect()
}
