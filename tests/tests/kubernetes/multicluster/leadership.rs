//! Replicas of the service mirror, each in a process of its own: only the holder of the lease writes and watches.
//!
//! Each replica has its own account with the permissions of the chart, so the audit log shows which replica sent a request.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::process::Command;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, SysconfVar, sysconf};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};
use tulle_bench::run::process::Process;
use tulle_tests::client;
use tulle_tests::cluster::AuditRecord;
use tulle_tests::programs::{built_binary, find};

use super::*;

/// A process of the service mirror. Its name is that of its account, and of the holder in the lease.
struct Replica {
    name: &'static str,
    process: Process,
    admin: SocketAddr,
}

impl Replica {
    async fn start(west: &ApiServer, name: &'static str) -> Self {
        let access = west.service_account_kubeconfig(NAMESPACE, name).await.unwrap();
        let admin = free_addr(west);
        // The kernel kills the process with the test, also while it is paused.
        let mut command = Command::new(find("setpriv").unwrap());
        command
            .arg("--pdeathsig=KILL")
            .arg(built_binary("tulle-control").unwrap())
            .args(["service-mirror", "-link-name=east"])
            .arg(format!("-namespace={NAMESPACE}"))
            .arg(format!("-kubeconfig={}", access.display()))
            .arg(format!("-metrics-addr={admin}"))
            .env("HOSTNAME", name);
        Self {
            name,
            process: Process::start(name, command, west.dir()).unwrap(),
            admin,
        }
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.process.id().cast_signed()), signal).unwrap();
    }

    /// Pauses the process when it has just learned of a new exported Service, which it mirrors a moment later. Returns the time.
    async fn pause_before_write(&self, east: &ApiServer, exported: &str) -> Instant {
        let before = self.metric(KNOWN_SERVICES).await.unwrap();
        export(east, exported).await;
        eventually(&format!("{exported} is known"), async || {
            (self.metric(KNOWN_SERVICES).await? > before).then_some(())
        })
        .await;
        self.signal(Signal::SIGSTOP);
        Instant::now()
    }

    async fn metric(&self, series: &str) -> Option<f64> {
        let stream = TcpStream::connect(self.admin).await.unwrap();
        metric_value(&client::get(stream, "/metrics").await.text(), series)
    }

    /// CPU time of the process so far, in seconds.
    fn cpu_seconds(&self) -> f64 {
        let (user, kernel) = self.process.cpu_ticks().unwrap();
        let ticks_per_second = sysconf(SysconfVar::CLK_TCK).unwrap().unwrap();
        (user + kernel) as f64 / ticks_per_second as f64
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}: {}", self.name, self.process.log_tail());
        }
    }
}

/// An unused port on the loopback address of an API server, which no other test uses.
pub(super) fn free_addr(server: &ApiServer) -> SocketAddr {
    let url: http::Uri = server.url().parse().unwrap();
    let ip: IpAddr = url.host().unwrap().parse().unwrap();
    TcpListener::bind((ip, 0)).unwrap().local_addr().unwrap()
}

/// Two clusters: `west` mirrors `web` of `east`, and has the accounts of these replicas.
async fn linked_clusters(replicas: &[&str]) -> (ApiServer, ApiServer) {
    let (west, east) = tokio::join!(cluster(&["east"]), cluster(&[]));
    let names = replicas.iter();
    let accounts: Vec<String> = names
        .map(|name| format!("--serviceaccount={NAMESPACE}:{name}"))
        .collect();
    let cluster_role = "--clusterrole=linkerd-multicluster-controller-access-local-resources";
    let role = "--role=controller-read-remote-creds-east";
    for grant in [
        ["create", "clusterrolebinding", "replicas", cluster_role].as_slice(),
        &["create", "rolebinding", "replicas", "-n", NAMESPACE, role],
    ] {
        let accounts = accounts.iter().map(String::as_str);
        let args: Vec<&str> = grant.iter().copied().chain(accounts).collect();
        west.kubectl(&args).await.unwrap();
    }
    export(&east, "web").await;
    put_credentials(&west, "east", &remote_access(&east).await).await;
    apply(&west, &link("east")).await;
    (west, east)
}

pub(super) async fn export(east: &ApiServer, name: &str) {
    apply(east, &service(name, &json!({"mirror.linkerd.io/exported": "true"}))).await;
}

async fn wait_until_mirrored(west: &ApiServer, name: &str) {
    wait_for_condition(west, "east", "mirrorServices", (name, "True", "")).await;
}

/// The holder in the lease; `None` if the lease is free.
async fn holder(west: &ApiServer) -> Option<String> {
    let leases = Api::<Lease>::namespaced(west.client(), NAMESPACE);
    let lease = leases.get_opt(LEASE).await.unwrap()?;
    lease.spec?.holder_identity.filter(|holder| !holder.is_empty())
}

/// Writes a holder into the lease, as another replica does. An empty name releases the lease.
async fn set_holder(west: &ApiServer, holder: &str) {
    let leases = Api::<Lease>::namespaced(west.client(), NAMESPACE);
    let spec = json!({"holderIdentity": holder, "renewTime": MicroTime(Timestamp::now())});
    let patch = Patch::Merge(json!({ "spec": spec }));
    leases.patch(LEASE, &PatchParams::default(), &patch).await.unwrap();
}

/// Waits until this replica is the holder. Returns the time since its predecessor stopped.
async fn wait_for_takeover(west: &ApiServer, successor: &Replica, stopped_at: Instant) -> Duration {
    let takeover = async {
        while holder(west).await.as_deref() != Some(successor.name) {
            sleep(Duration::from_millis(20)).await;
        }
    };
    let taken = timeout_at(stopped_at + MAX_TAKEOVER_TIME, takeover).await;
    assert!(
        taken.is_ok(),
        "{} has not taken over within {MAX_TAKEOVER_TIME:?}",
        successor.name
    );
    stopped_at.elapsed()
}

/// Waits until a replica has read the lease `n` times from now on, which a replica does while it is not the holder.
async fn wait_for_lease_reads(west: &ApiServer, replica: &Replica, n: usize) {
    let n_records = west.audit_log().unwrap().len();
    eventually(&format!("{} has read the lease {n} times", replica.name), async || {
        let records = records_after(west, n_records);
        let is_read = |record: &&AuditRecord| is_lease_read(record) && account(record) == Some(replica.name);
        (records.iter().filter(is_read).count() >= n).then_some(())
    })
    .await;
}

/// The audit records of an API server without the first `n`.
fn records_after(server: &ApiServer, n: usize) -> Vec<AuditRecord> {
    server.audit_log().unwrap().split_off(n)
}

/// The name of the account that sent a request, if it is in the namespace of the replicas.
fn account(record: &AuditRecord) -> Option<&str> {
    let account = record.user.username.strip_prefix("system:serviceaccount:")?;
    account.strip_prefix(NAMESPACE)?.strip_prefix(':')
}

/// The replica that sent a write. `None` for reads and for requests for leases.
fn writer(record: &AuditRecord) -> Option<&str> {
    let is_write = matches!(&*record.verb, "create" | "update" | "patch" | "delete");
    account(record).filter(|_| is_write && !is_for_lease(record))
}

fn is_lease_read(record: &AuditRecord) -> bool {
    record.verb == "get" && is_for_lease(record)
}

fn is_for_lease(record: &AuditRecord) -> bool {
    let object = record.object_ref.as_ref();
    object.is_some_and(|object| object.resource == "leases")
}

/// The number of open watches of service accounts, by cluster and kind. The start and the end of a watch have a record each.
fn open_watches(west: &ApiServer, east: &ApiServer) -> BTreeMap<String, i32> {
    let mut open = BTreeMap::new();
    for (cluster, server) in [("west", west), ("east", east)] {
        for record in server.audit_log().unwrap() {
            let change = match &*record.stage {
                "ResponseStarted" => 1,
                "ResponseComplete" => -1,
                _ => continue,
            };
            if record.verb == "watch" {
                let kind = record.object_ref.unwrap_or_default().resource;
                *open.entry(format!("{cluster} {kind}")).or_insert(0) += change;
            }
        }
    }
    open.retain(|_, n| *n != 0);
    open
}

async fn wait_for_watches(west: &ApiServer, east: &ApiServer, expected: &BTreeMap<String, i32>) {
    eventually(&format!("the open watches are {expected:?}"), async || {
        (open_watches(west, east) == *expected).then_some(())
    })
    .await;
}

/// With `TULLE_TEST_FULL=1` only, because two takeovers and the pause take more than a minute.
#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_is_killed_or_paused_is_replaced_within_32_seconds_and_writes_nothing_on_waking() {
    if std::env::var_os("TULLE_TEST_FULL").is_none() {
        eprintln!("skipped without TULLE_TEST_FULL=1");
        return;
    }
    let (west, east) = linked_clusters(&["first", "second", "third"]).await;
    let first = Replica::start(&west, "first").await;
    let second = Replica::start(&west, "second").await;
    let leader = eventually("a replica holds the lease", async || holder(&west).await).await;
    let (killed, paused) = match leader == first.name {
        true => (first, second),
        false => (second, first),
    };
    assert_eq!(leader, killed.name);
    wait_until_mirrored(&west, "web").await;
    wait_for_lease_reads(&west, &paused, 1).await;

    let killed_at = Instant::now();
    killed.signal(Signal::SIGKILL);
    let waited = wait_for_takeover(&west, &paused, killed_at).await;
    println!("taken over {waited:?} after the kill");
    export(&east, "after-kill").await;
    wait_until_mirrored(&west, "after-kill").await;

    let third = Replica::start(&west, "third").await;
    wait_for_lease_reads(&west, &third, 1).await;
    let paused_at = paused.pause_before_write(&east, "before-pause").await;
    export(&east, "during-pause").await;
    let waited = wait_for_takeover(&west, &third, paused_at).await;
    println!("taken over {waited:?} after the pause");
    for exported in ["before-pause", "during-pause"] {
        wait_until_mirrored(&west, exported).await;
    }
    services(east.client())
        .delete("after-kill", &Default::default())
        .await
        .unwrap();
    wait_until_gone(&west, "after-kill-east").await;
    sleep_until(paused_at + PAUSE).await;

    let n_records = west.audit_log().unwrap().len();
    paused.signal(Signal::SIGCONT);
    export(&east, "after-waking").await;
    wait_until_mirrored(&west, "after-waking").await;
    wait_for_lease_reads(&west, &paused, 3).await;
    let log = west.audit_log().unwrap();
    let is_late = |record: &&AuditRecord| writer(record) == Some(paused.name);
    let late = log[n_records..].iter().filter(is_late);
    let late: Vec<_> = late.map(|record| (&record.verb, &record.uri)).collect();
    assert!(late.is_empty(), "{} wrote on waking: {late:?}", paused.name);
    assert_eq!(holder(&west).await.as_deref(), Some(third.name));
    // Each replica writes only before the first write of the next.
    let mut writers: Vec<&str> = log.iter().filter_map(writer).collect();
    writers.dedup();
    assert_eq!(writers, [killed.name, paused.name, third.name]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_loses_the_lease_is_idle_and_has_one_set_of_watches_when_it_holds_the_lease_again() {
    let (west, east) = linked_clusters(&["only"]).await;
    let replica = Replica::start(&west, "only").await;
    wait_until_mirrored(&west, "web").await;
    let one_set = BTreeMap::from(WATCHES_OF_LEADER.map(|watch| (watch.to_owned(), 1)));
    wait_for_watches(&west, &east, &one_set).await;

    set_holder(&west, "other").await;
    wait_for_watches(&west, &east, &BTreeMap::new()).await;
    let n_records = [&west, &east].map(|server| server.audit_log().unwrap().len());
    let (cpu_before, idle_since) = (replica.cpu_seconds(), Instant::now());
    export(&east, "late").await;
    wait_for_lease_reads(&west, &replica, 3).await;
    let share = (replica.cpu_seconds() - cpu_before) / idle_since.elapsed().as_secs_f64();
    println!("{:.2} % of a CPU without the lease", 100.0 * share);
    assert!(share < MAX_IDLE_CPU_SHARE, "{share}");
    let later = [&west, &east].into_iter().zip(n_records);
    let requests: Vec<String> = later
        .flat_map(|(server, n)| records_after(server, n))
        .filter(|record| !is_lease_read(record))
        .map(|record| format!("{} {}", record.verb, record.uri))
        .collect();
    assert!(requests.is_empty(), "{requests:?}");
    let mirror = services(west.client()).get_opt("late-east").await.unwrap();
    assert!(mirror.is_none());
    assert_eq!(holder(&west).await.as_deref(), Some("other"));

    set_holder(&west, "").await;
    wait_until_mirrored(&west, "late").await;
    assert_eq!(holder(&west).await.as_deref(), Some(replica.name));
    wait_for_watches(&west, &east, &one_set).await;
    export(&east, "last").await;
    wait_until_mirrored(&west, "last").await;
    assert_eq!(open_watches(&west, &east), one_set);
}

const LEASE: &str = "service-mirror-write-east";
/// The number of Services of `east` that a replica knows.
const KNOWN_SERVICES: &str = "service_cache_size{cluster=\"east\"}";
const WATCHES_OF_LEADER: [&str; 7] = [
    "east endpointslices",
    "east services",
    "west endpoints",
    "west links",
    "west namespaces",
    "west secrets",
    "west services",
];
/// The lease lasts 30 s. The rest is for the requests of a candidate.
const MAX_TAKEOVER_TIME: Duration = Duration::from_secs(32);
/// Longer than the lease.
const PAUSE: Duration = Duration::from_secs(40);
/// A replica that is not the holder sends one request in two seconds. A loop without a pause takes a whole CPU.
const MAX_IDLE_CPU_SHARE: f64 = 0.03;
