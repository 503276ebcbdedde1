//! Clusters whose members find each other by the names of their pods.

use tulle_tests::images::Image;

use super::cassandra;
use super::server::{Disturbance, InboundMode, Readiness, Server, Writer, script};

pub(super) const ALL: [Server; 10] = [
    POSTGRES,
    MARIADB,
    SENTINEL,
    REDIS_CLUSTER,
    RABBITMQ,
    KAFKA,
    ETCD,
    ZOOKEEPER,
    NATS,
    cassandra::RING,
];
/// Those whose only scenes are disturbances.
pub(super) const DISTURBED_ONLY: [Server; 1] = [KAFKA_WITHOUT_PROBES];

const THREE: Server = Server {
    members: 3,
    ..Server::DEFAULT
};

const THREE_BROKERS: Server = Server {
    image: Image::Brokers,
    ..THREE
};

/// A primary, and two standbys, one of which has to apply each transaction before its client gets a response.
const POSTGRES: Server = Server {
    name: "postgres3",
    port: 5432,
    start: "
primary=postgres3-0.postgres3-pods
export PGUSER=postgres
if [[ -e /data/db/PG_VERSION ]]; then
  echo 'started again'
elif [[ $POD_NAME == postgres3-0 ]]; then
  initdb -D /data/db -U postgres -A trust -E UTF8 --no-locale >&2
  printf '%s\\n' 'host all all all trust' 'host replication all all trust' >> /data/db/pg_hba.conf
  printf '%s\\n' \"synchronous_standby_names = 'ANY 1 (*)'\" 'synchronous_commit = remote_apply' >> /data/db/postgresql.conf
else
  until pg_isready -h $primary -p $PORT; do sleep 1; done
  pg_basebackup -h $primary -p $PORT -D /data/db -R --checkpoint=fast
  chmod 700 /data/db
fi
exec postgres -D /data/db -p $PORT -k /tmp -c listen_addresses='*' -c cluster_name=${POD_NAME//-/_}",
    readiness: Readiness::Script("pg_isready -h 127.0.0.1 -p $PORT -U postgres"),
    version: "postgres --version",
    client: "
at() { psql -qAtX -v ON_ERROR_STOP=1 -h postgres3-$1.postgres3-pods -p $port -U postgres \"${@:2}\"; }",
    formation_check: script(
        "at 0 -c \"select count(*) from pg_stat_replication where state = 'streaming' and sync_state = 'quorum'\"",
        "2",
    ),
    writer: Some(Writer {
        kind: "postgres",
        port: 5432,
        leader: "echo postgres3-0",
    }),
    own_scenes: &[
        (
            "a write is read at the standbys",
            script(
                "at 0 -c 'create table t as select 42 as a'
for i in 1 2; do until at $i -c 'select a from t' 2> /tmp/error; do sleep 0.1; done; done",
                "42\n42",
            ),
        ),
        (
            "a standby is promoted",
            script(
                "at 1 -c 'select pg_promote()'
at 1 -c 'set synchronous_commit = local' -c 'insert into t values (43)' -c 'select max(a) from t'",
                "t\n43",
            ),
        ),
    ],
    ..THREE
};

/// A primary that waits until one of two replicas has a transaction.
const MARIADB: Server = Server {
    name: "mariadb3",
    port: 3306,
    start: r#"
primary=mariadb3-0.mariadb3-pods
if [[ ! -d /data/db/mysql ]]; then
  mariadb-install-db --no-defaults --datadir=/data/db --auth-root-authentication-method=normal --skip-test-db >&2
fi
printf '%s\n' 'set sql_log_bin = 0;' "create user if not exists app@'%' identified by 'secret';" \
  "grant all on *.* to app@'%';" 'create database if not exists app;' > /tmp/init.sql
if [[ $POD_NAME != mariadb3-0 ]]; then
  printf '%s\n' "change master to master_host='$primary', master_port=$PORT, master_user='app', master_password='secret', \
master_connect_retry=1, master_use_gtid=slave_pos;" 'start slave;' >> /tmp/init.sql
fi
exec mariadbd --no-defaults --datadir=/data/db --port=$PORT --socket=/tmp/mariadb.sock --bind-address=0.0.0.0 \
  --skip-name-resolve --server-id=$((${POD_NAME##*-} + 1)) --log-bin=/data/db/binlog --rpl-semi-sync-master-enabled=ON \
  --rpl-semi-sync-slave-enabled=ON --init-file=/tmp/init.sql"#,
    readiness: Readiness::Script("mariadb --no-defaults -h127.0.0.1 -P$PORT -uapp -psecret -e 'select 1'"),
    version: "mariadbd --version",
    client: "
at() { mariadb --no-defaults -hmariadb3-$1.mariadb3-pods -P$port -uapp -psecret -Ns -e \"$2\" app; }",
    formation_check: script(
        "at 0 \"show status like 'rpl_semi_sync_master_clients'\" | cut -f 2",
        "2",
    ),
    own_scenes: &[
        (
            "a write is read at the replicas",
            script(
                "at 0 'create table t as select 42 as a'
for i in 1 2; do until at $i 'select a from t' 2> /tmp/error; do sleep 0.1; done; done",
                "42\n42",
            ),
        ),
        (
            "a replica becomes the primary",
            script(
                "at 1 'stop slave; reset slave all'
at 2 \"stop slave; change master to master_host='mariadb3-1.mariadb3-pods'; start slave\"
at 1 'insert into t values (43)'
until at 2 'select a from t where a = 43' | grep 43; do sleep 0.1; done",
                "43",
            ),
        ),
    ],
    ..THREE
};

/// Members announce the names of their pods, as the usual charts let them do.
const SENTINEL: Server = Server {
    name: "sentinel",
    port: 6379,
    start: "
domain=sentinel-pods.$POD_NAMESPACE.svc.cluster.local
own=$POD_NAME.$domain first=sentinel-0.$domain
if [[ ! -e /data/sentinel.conf ]]; then
  printf '%s\\n' \"port $PORT\" 'protected-mode no' 'dir /data' 'appendonly yes' \"replica-announce-ip $own\" > /data/redis.conf
  if [[ $POD_NAME != sentinel-0 ]]; then echo \"replicaof $first $PORT\" >> /data/redis.conf; fi
  printf '%s\\n' 'port 26379' 'protected-mode no' 'sentinel resolve-hostnames yes' 'sentinel announce-hostnames yes' \\
    \"sentinel announce-ip $own\" \"sentinel monitor main $first $PORT 2\" 'sentinel down-after-milliseconds main 5000' > /data/sentinel.conf
fi
redis-sentinel /data/sentinel.conf &
exec redis-server /data/redis.conf",
    readiness: Readiness::Script("redis-cli -h 127.0.0.1 -p $PORT ping | grep PONG"),
    version: "redis-server --version",
    client: "
ask() { redis-cli -h sentinel-$1.sentinel-pods -p 26379 sentinel \"${@:2}\"; }
master() { ask $1 get-master-addr-by-name main | sed -n 1p; }",
    formation_check: script(
        "for i in 0 1 2; do
  ask $i master main | tr '\\n' ' ' | grep -oE '(num-slaves|num-other-sentinels|flags) [^ ]*'
done",
        "flags master\nnum-slaves 2\nnum-other-sentinels 2\nflags master\nnum-slaves 2\nnum-other-sentinels 2\n\
         flags master\nnum-slaves 2\nnum-other-sentinels 2",
    ),
    writer: Some(Writer {
        kind: "sentinel",
        port: 26379,
        leader: "master=$(master 0); echo ${master%%.*}",
    }),
    own_scenes: &[
        (
            "a write reaches both replicas",
            script(
                "printf 'set a 42\\nwait 2 5000\\n' | redis-cli -h $(master 0) -p $port
redis-cli -h sentinel-2.sentinel-pods -p $port get a",
                "OK\n2\n42",
            ),
        ),
        (
            "a replica becomes master",
            script(
                "old=$(master 0)
ask 1 failover main
until new=$(master 2) && [[ $new != \"$old\" ]]; do sleep 0.1; done
until redis-cli -h $new -p $port set a 43 | grep OK; do sleep 0.1; done
redis-cli -h $new -p $port get a",
                "OK\nOK\n43",
            ),
        ),
    ],
    ..THREE
};

/// A node takes the address of its peer from the connection, and therefore has to see it.
const REDIS_CLUSTER: Server = Server {
    name: "redis-cluster",
    port: 6379,
    members: 6,
    inbound_mode: InboundMode::Tproxy,
    start: "exec redis-server --port $PORT --protected-mode no --dir /data --appendonly yes --cluster-enabled yes --cluster-node-timeout 5000",
    readiness: Readiness::Script("redis-cli -h 127.0.0.1 -p $PORT ping | grep PONG"),
    version: "redis-server --version",
    client: "
at() { redis-cli -c -h redis-cluster-$1.redis-cluster-pods -p $port \"${@:2}\"; }
nodes() { for i in 0 1 2 3 4 5; do echo $(getent hosts redis-cluster-$i.redis-cluster-pods | cut -d ' ' -f 1):$port; done; }",
    formation_check: script(
        "at 0 cluster info | grep cluster_known_nodes:6 > /tmp/known || redis-cli --cluster create $(nodes) --cluster-replicas 1 --cluster-yes >&2
for i in 0 1 2 3 4 5; do at $i cluster info | tr -d '\\r' | grep -E 'cluster_state|cluster_known_nodes'; done | sort | uniq -c | tr -s ' '",
        "6 cluster_known_nodes:6\n 6 cluster_state:ok",
    ),
    writer: Some(Writer {
        kind: "redis-cluster",
        port: 6379,
        leader: "
for i in 0 1 2 3 4 5; do
  [[ $(redis-cli -h redis-cluster-$i.redis-cluster-pods -p $port scard $name) == *MOVED* ]] || echo redis-cluster-$i
done",
    }),
    own_scenes: &[(
        "keys of all nodes",
        script(
            "for i in $(seq 100); do echo \"set key$i $i\"; done | at 0 | grep -c OK
for i in $(seq 100); do echo \"get key$i\"; done | at 5 | grep -cE '^[0-9]+$'",
            "100\n100",
        ),
    )],
    ..Server::DEFAULT
};

const RABBITMQ: Server = Server {
    name: "rabbitmq3",
    port: 5672,
    start: "
domain=rabbitmq3-pods.$POD_NAMESPACE.svc.cluster.local
export HOME=/data RABBITMQ_MNESIA_BASE=/data/mnesia RABBITMQ_LOGS=- RABBITMQ_LOG_BASE=/data ERL_CRASH_DUMP=/data/crash
export RABBITMQ_USE_LONGNAME=true RABBITMQ_NODENAME=rabbit@$POD_NAME.$domain
export RABBITMQ_CONFIG_FILE=/tmp/rabbitmq.conf RABBITMQ_ENABLED_PLUGINS_FILE=/tmp/plugins
echo '[rabbitmq_management].' > /tmp/plugins
[[ -e /data/.erlang.cookie ]] || printf secret > /data/.erlang.cookie
chmod 400 /data/.erlang.cookie
printf '%s\\n' \"listeners.tcp.default = $PORT\" 'loopback_users.guest = false' 'cluster_partition_handling = autoheal' \\
  'cluster_formation.peer_discovery_backend = classic_config' > /tmp/rabbitmq.conf
for i in 0 1 2; do echo \"cluster_formation.classic_config.nodes.$i = rabbit@rabbitmq3-$i.$domain\"; done >> /tmp/rabbitmq.conf
exec /usr/lib/rabbitmq/bin/rabbitmq-server",
    version: "ls -d /usr/lib/rabbitmq/lib/rabbitmq_server-*",
    client: "
api() { curl -sSf -u guest:guest -H 'content-type: application/json' http://rabbitmq3-$1.rabbitmq3-pods:15672/api/$2 \"${@:3}\"; }
url() { echo amqp://guest:guest@rabbitmq3-$1.rabbitmq3-pods:$port; }",
    formation_check: script("api 0 nodes?columns=running | grep -o true | wc -l", "3"),
    writer: Some(Writer {
        kind: "rabbitmq",
        port: 5672,
        leader: "api 0 queues/%2f/$name?columns=leader | grep -o '@[^.]*' | cut -c 2-",
    }),
    own_scenes: &[(
        "quorum queue",
        script(
            "api 0 queues/%2f/q -X PUT -d '{\"durable\": true, \"arguments\": {\"x-queue-type\": \"quorum\"}}'
amqp-publish -u $(url 0) -r q -b 42 -p
amqp-get -u $(url 2) -q q",
            "42",
        ),
    )],
    ..THREE_BROKERS
};

const KAFKA: Server = Server {
    name: "kafka3",
    port: 9092,
    start: "
cluster=${POD_NAME%-*}
voters=$(for i in 0 1 2; do printf \",%s@$cluster-%s.$cluster-pods:9093\" $((i + 1)) $i; done)
printf '%s\\n' process.roles=broker,controller node.id=$((${POD_NAME##*-} + 1)) controller.quorum.voters=${voters#,} \\
  listeners=PLAINTEXT://:$PORT,CONTROLLER://:9093 advertised.listeners=PLAINTEXT://$POD_NAME.$cluster-pods:$PORT \\
  controller.listener.names=CONTROLLER log.dirs=/data/kafka default.replication.factor=3 min.insync.replicas=2 \\
  group.initial.rebalance.delay.ms=0 > /tmp/kafka.properties
run() { java -Xmx512m -Dlog4j.configuration=file:/etc/log4j.properties -cp '/usr/share/brokers/*' \"$@\"; }
run kafka.tools.StorageTool format -t MkU3OEVBNTcwNTJENDM2Qg -c /tmp/kafka.properties --ignore-formatted
exec java -Xmx512m -Dlog4j.configuration=file:/etc/log4j.properties -cp '/usr/share/brokers/*' kafka.Kafka /tmp/kafka.properties",
    version: "ls /usr/share/brokers/kafka-clients-*",
    client: "
run() {
  java -Xmx256m -Dlog4j.configuration=file:/etc/log4j.properties -cp '/usr/share/brokers/*' org.apache.kafka.tools.\"$1\" \\
    --bootstrap-server $host-$2.$host-pods:$port \"${@:3}\"
}",
    formation_check: script(
        "run MetadataQuorumCommand 0 describe --replication | grep -cE 'Leader|Follower'",
        "3",
    ),
    writer: Some(Writer {
        kind: "kafka",
        port: 9092,
        leader: "
leader=$(run TopicCommand 0 --describe --topic $name | grep -o 'Leader: [0-9]*')
echo $host-$((${leader#* } - 1))",
    }),
    own_scenes: &[(
        "a message with three replicas",
        script(
            "run TopicCommand 0 --create --topic a --partitions 1 --replication-factor 3 >&2
java -Xmx256m -Dlog4j.configuration=file:/etc/log4j.properties -cp '/usr/share/brokers/*' kafka.tools.ConsoleProducer \\
  --bootstrap-server $host-0.$host-pods:$port --producer-property acks=all --topic a <<< 42
run consumer.ConsoleConsumer 2 --from-beginning --max-messages 1 --topic a
run TopicCommand 2 --describe --topic a | sed -n 's/.*Isr: \\([0-9,]*\\).*/\\1/p' | tr ',' '\\n' | sort | tr '\\n' ' '",
            "42\n1 2 3",
        ),
    )],
    ..THREE_BROKERS
};

/// A member is restarted as soon as the member before it runs, not when it has joined again.
const KAFKA_WITHOUT_PROBES: Server = Server {
    name: "kafka3-unprobed",
    readiness: Readiness::None,
    disturbances: &[Disturbance::Rollout],
    ..KAFKA
};

const ETCD: Server = Server {
    name: "etcd3",
    port: 2379,
    start: "
url=http://$POD_NAME.etcd3-pods
members=$(for i in 0 1 2; do printf ',etcd3-%s=http://etcd3-%s.etcd3-pods:2380' $i $i; done)
exec etcd --name $POD_NAME --data-dir /data/etcd --listen-peer-urls http://0.0.0.0:2380 --initial-advertise-peer-urls $url:2380 \\
  --listen-client-urls http://0.0.0.0:$PORT --advertise-client-urls $url:$PORT --initial-cluster ${members#,}",
    readiness: Readiness::Http("/health", None),
    version: "etcd --version | sed -n 1p",
    client: "
export ETCDCTL_API=3
at() { etcdctl --endpoints http://etcd3-$1.etcd3-pods:$port \"${@:2}\"; }",
    formation_check: script("at 0 endpoint health --cluster 2>&1 | grep -c 'is healthy'", "3"),
    writer: Some(Writer {
        kind: "etcd",
        port: 2379,
        // `etcdctl endpoint status` of this version sends an authority that HTTP/2 forbids.
        leader: "
for i in 0 1 2; do
  if curl -sSf http://etcd3-$i.etcd3-pods:$port/metrics | grep '^etcd_server_is_leader 1' > /tmp/leader; then echo etcd3-$i; fi
done",
    }),
    own_scenes: &[(
        "a write is read at another member",
        script("at 0 put a 42; at 2 get --print-value-only a", "OK\n42"),
    )],
    ..THREE_BROKERS
};

const ZOOKEEPER: Server = Server {
    name: "zookeeper3",
    port: 2181,
    start: "
mkdir -p /data/zookeeper
echo $((${POD_NAME##*-} + 1)) > /data/zookeeper/myid
printf '%s\\n' tickTime=2000 initLimit=10 syncLimit=5 dataDir=/data/zookeeper clientPort=$PORT admin.enableServer=false \\
  '4lw.commands.whitelist=*' quorumListenOnAllIPs=true > /tmp/zoo.cfg
for i in 0 1 2; do echo server.$((i + 1))=zookeeper3-$i.zookeeper3-pods:2888:3888; done >> /tmp/zoo.cfg
exec java -Xmx256m -Dzookeeper.fastleader.maxNotificationInterval=2000 -Dlog4j.configuration=file:/etc/log4j.properties \\
  -cp '/usr/share/brokers/*' org.apache.zookeeper.server.quorum.QuorumPeerMain /tmp/zoo.cfg",
    readiness: Readiness::Script("echo ruok | nc 127.0.0.1 $PORT | grep imok"),
    version: "ls /usr/share/brokers/zookeeper-?.*",
    client: "
state() { echo mntr | nc zookeeper3-$1.zookeeper3-pods $port | sed -n 's/^zk_server_state.//p'; }
at() {
  java -Xmx256m -Dlog4j.configuration=file:/etc/log4j.properties -cp '/usr/share/brokers/*' \\
    org.apache.zookeeper.ZooKeeperMain -server zookeeper3-$1.zookeeper3-pods:$port
}",
    formation_check: script("for i in 0 1 2; do state $i; done | sort", "follower\nfollower\nleader"),
    writer: Some(Writer {
        kind: "zookeeper",
        port: 2181,
        leader: "for i in 0 1 2; do if [[ $(state $i) == leader ]]; then echo zookeeper3-$i; fi; done",
    }),
    own_scenes: &[(
        "a write is read at another member",
        script(
            "printf 'create /a 42\\nquit\\n' | at 0 >&2; printf 'sync /\\nget /a\\nquit\\n' | at 2 | grep -x 42",
            "42",
        ),
    )],
    ..THREE_BROKERS
};

const NATS: Server = Server {
    name: "nats3",
    port: 4222,
    start: "
routes=$(for i in 0 1 2; do printf ',nats://nats3-%s.nats3-pods:6222' $i; done)
exec nats-server -n $POD_NAME -p $PORT -m 8222 -js -sd /data --cluster_name nats3 --cluster nats://0.0.0.0:6222 --routes ${routes#,}",
    readiness: Readiness::Http("/healthz", Some(8222)),
    version: "nats-server --version",
    client: "
export HOME=/tmp
at() { nats --server nats://nats3-$1.nats3-pods:$port \"${@:2}\"; }",
    formation_check: script(
        "for i in 0 1 2; do curl -sSf http://nats3-$i.nats3-pods:8222/jsz | grep -c '\"cluster_size\": 3'; done",
        "1\n1\n1",
    ),
    writer: Some(Writer {
        kind: "nats",
        port: 4222,
        leader: r#"at 0 stream info $name -j | grep -o '"leader": "[^"]*' | sed -n 1p | cut -d '"' -f 4"#,
    }),
    own_scenes: &[(
        "a value with three replicas",
        script("at 0 kv add a --replicas=3 >&2; at 0 kv put a a 42; at 2 kv get a a --raw", "42\n42"),
    )],
    ..THREE_BROKERS
};
