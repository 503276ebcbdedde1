//! Cassandra, alone and as a ring.

use tulle_tests::images::Image;

use super::server::{Server, TEN_MIB, Writer, script};

pub(super) const CASSANDRA: Server = Server {
    name: "cassandra",
    start: START,
    query: script(
        "ask <<'END'
create keyspace if not exists k with replication = {'class': 'SimpleStrategy', 'replication_factor': 1}
create table if not exists k.a (id int primary key, value int)
insert into k.a (id, value) values (1, 42)
select value from k.a where id = 1
END",
        "42",
    ),
    // The header of the response to a request for the supported options.
    small_query: Some(script("exec 3<>/dev/tcp/$host/$port; options", "84 00 00 00 06")),
    // Ten values, because statements of 10 MiB are refused; they are read in one response.
    large: Some(script(
        "{
  echo 'create table if not exists k.big (id int primary key, value text)'
  for i in 0 1 2 3 4 5 6 7 8 9; do
    printf \"insert into k.big (id, value) values ($i, '\"; head -c 1048576 /dev/zero | tr '\\0' x; echo \"')\"
  done
  echo 'select value from k.big'
} | ask | tr -d '\\n' | wc -c",
        TEN_MIB,
    )),
    idle: Some(script(
        "exec 3<>/dev/tcp/$host/$port; options; sleep $idle; options",
        "84 00 00 00 06\n84 00 00 00 06",
    )),
    client: "
ask() { cql $host:$port ONE; }
options() {
  printf '\\x04\\0\\0\\0\\x05\\0\\0\\0\\0' >&3
  echo $(head -c 5 <&3 | od -An -tx1)
  local length=$(head -c 4 <&3 | od -An -tu1 | awk '{print $1 * 16777216 + $2 * 65536 + $3 * 256 + $4}')
  head -c $length <&3 > /tmp/options
}",
    ..COMMON
};

/// Each member has all rows. They start as seeds, because members that copy rows would have to start one after another.
pub(super) const RING: Server = Server {
    name: "cassandra3",
    members: 3,
    start: START,
    client: "
at() { cql cassandra3-$1.cassandra3-pods:$port ${2:-QUORUM}; }",
    // A keyspace with three replicas that every ring has.
    formation_check: script(
        "for i in 0 1 2; do
  echo 'select count(*) from system.peers' | at $i
  echo 'select count(*) from system_distributed.view_build_status' | at $i ALL
done",
        "2\n0\n2\n0\n2\n0",
    ),
    writer: Some(Writer {
        kind: "cassandra",
        port: 9042,
        leader: "echo cassandra3-0", // members are equal
    }),
    own_scenes: &[(
        "a write is read at another member",
        script(
            "at 0 <<'END'
create keyspace k with replication = {'class': 'SimpleStrategy', 'replication_factor': 3}
create table k.a (id int primary key, value int)
insert into k.a (id, value) values (1, 42)
END
echo 'select value from k.a where id = 1' | at 2",
            "42",
        ),
    )],
    ..COMMON
};

const COMMON: Server = Server {
    image: Image::Brokers,
    port: 9042,
    version: "ls /usr/share/cassandra/cassandra-all-*",
    ..Server::DEFAULT
};

const START: &str = "
ring=${POD_NAME%-*}
seeds=$POD_NAME.$ring-pods
if [[ $ring == cassandra3 ]]; then
  seeds=cassandra3-0.cassandra3-pods,cassandra3-1.cassandra3-pods,cassandra3-2.cassandra3-pods
fi
for seed in ${seeds//,/ }; do until getent hosts $seed; do sleep 1; done; done
printf '%s\\n' 'cluster_name: test' 'partitioner: org.apache.cassandra.dht.Murmur3Partitioner' \\
  'commitlog_sync: batch' 'endpoint_snitch: SimpleSnitch' 'num_tokens: 4' \\
  \"seed_provider: [{class_name: org.apache.cassandra.locator.SimpleSeedProvider, parameters: [{seeds: '$seeds'}]}]\" \\
  \"listen_address: $POD_IP\" 'rpc_address: 0.0.0.0' \"broadcast_rpc_address: $POD_IP\" \"native_transport_port: $PORT\" > /tmp/cassandra.yaml
exec java @/etc/cassandra.options -cp '/usr/share/cassandra/*' org.apache.cassandra.service.CassandraDaemon";
